"""Frozen parameters: gradients equal those of plain Hugging Face with `requires_grad` False, and the rest keeps its bits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import mesh_parity
import mesh_ranks
from engines import host_engine
from families import BY_NAME, batch, build
from fp64 import Fp32MeansFp64
from host_ranks import RankCase, steps_of
from host_ranks import engine_of as rank_engine_of
from megatrain.engine.host.engine import HostEngine
from megatrain.errors import UserError
from megatrain.models.trainable import Trainable
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import OptimizerSpec, StateSpec
from mesh_parity import differences
from reference import gradient_error, reference_loss_and_grads

LLAMA = BY_NAME["llama"]
LAYERS = LLAMA.overrides.get("num_hidden_layers", 3)
CASES: dict[str, tuple[bool, Trainable, dict[str, Any]]] = {
    "first-layers": (False, Trainable(freeze=["embed_tokens", r"layers\.[01]\."]), {}),
    "first-layers-tied": (True, Trainable(freeze=[r"layers\.[01]\."]), {"keep": [1]}),
    "last-layers": (True, Trainable(freeze=[r"layers\.[23]\.", r"model\.norm"]), {"selective": "all"}),
    "embedding-tied": (True, Trainable(freeze=["embed_tokens"]), {"microbatch_rows": 1}),
    "head-untied": (False, Trainable(freeze=["lm_head"]), {"accumulation_steps": 2, "microbatch_rows": 1}),
    "head-alone": (False, Trainable(only=["lm_head"]), {}),
    "one-matrix-of-a-middle-layer": (False, Trainable(only=[r"layers\.1\..*down_proj"]), {"segment": 2}),
    "parts-kept": (True, Trainable(only=["q_proj", r"layers\.2\.mlp"]), {"keep": "all", "offload_input": "all"}),
    "resident": (False, Trainable(only=[r"layers\.[12]\..*v_proj", "norm"]), {"resident": "all"}),
    "segment": (False, Trainable(freeze=["embed_tokens", r"layers\.0\.", "up_proj"]), {"segment": 2}),
}


def model_of(tied: bool) -> Any:
    return build(LLAMA, seed=3, tie=tied)


def rows_of(seed: int = 0) -> dict[str, torch.Tensor]:
    return batch(LLAMA, seed=seed, rows=4, tokens=16, kind="padded")


def engine_of(model: Any, trainable: Trainable | None, **words: Any) -> HostEngine:
    words = {"compute_dtype": "fp32", "threads": 2, **words}
    return host_engine(model, device="cpu", verify="never", trainable=trainable, **words)


def frozen_bits(engine: HostEngine) -> dict[str, torch.Tensor]:
    named = dict(engine.named_parameters())
    return {name: named[name].clone() for name in named if name in engine.structure.frozen}


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_steps_equal_plain_hugging_face(name: str) -> None:
    tied, trainable, plan = CASES[name]
    plain = model_of(tied)
    with engine_of(plain, trainable, optim=AdamW(1e-3, max_grad_norm=0.5), **plan) as engine:
        trainable.apply(plain)
        wanted = reference_loss_and_grads(plain, rows_of())
        found = engine.backward(rows_of())
        gradients = dict(engine.named_gradients())
        trained = {n: p for n, p in plain.named_parameters() if p.requires_grad}
        assert abs(found.loss - wanted.loss) < 1e-5
        assert gradient_error({n: gradients[n] for n in trained}, {n: wanted.gradients[n] for n in trained})[0] < 1e-5
        assert not any(gradients[n].any() for n in engine.structure.frozen & gradients.keys())
        norm = torch.stack([wanted.gradients[n].norm() for n in trained]).norm().item()
        assert found.grad_norm == pytest.approx(norm, rel=1e-5)

        before = frozen_bits(engine)
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for n, p in trained.items() if p.ndim >= 2], "weight_decay": engine.optim.weight_decay},
                {"params": [p for n, p in trained.items() if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=1e-3,
            betas=engine.optim.betas,
        )
        for step in range(3):
            engine.train_step(rows_of(step))
            wanted = reference_loss_and_grads(plain, rows_of(step))
            for n, p in trained.items():
                p.grad = wanted.gradients[n]
            torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
            optimizer.step()
        after = dict(engine.named_parameters())
        for n, p in trained.items():
            torch.testing.assert_close(after[n], p.detach(), rtol=1e-5, atol=1e-5)
        assert before and all(torch.equal(after[n], weight) for n, weight in before.items())


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_frozen_parameters_hold_their_compute_weight_alone(compute: str) -> None:
    with engine_of(model_of(False), CASES["segment"][1], compute_dtype=compute) as engine:
        layouts = [unit.layout for unit in engine.structure.units]
        whole, trained = sum(x.numel for x in layouts), sum(x.trained_numel for x in layouts)
        assert 0 < trained < 0.7 * whole
        hi, rest = (2, 2 + 8 + 2) if compute == "bf16" else (4, 8 + 4)
        memory = engine.memory()
        planes = sum(memory.get(f"host_{kind}", 0) for kind in ("hi", "lo", "m", "v", "grad"))
        wanted = hi * whole + rest * trained
        assert wanted <= planes <= wanted + 5 * 4096 * (len(layouts) + 1)


def test_layers_before_the_first_trained_one_are_not_read_again() -> None:
    with engine_of(model_of(False), Trainable(only=[r"layers\.3\."]), weight_slots=2) as engine:
        engine.train_step(rows_of())
        sizes = [u.layout.numel * 4 for u in engine.structure.units]
        assert engine.counters()["weight_bytes"] == sum(sizes)  # the last layer stays in its slot
        assert engine.counters()["gradient_bytes"] == sizes[-2]


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_a_run_resumes_to_the_bit_and_its_checkpoint_is_a_model(compute: str, tmp_path: Path) -> None:
    trainable = CASES["segment"][1]
    model = model_of(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with engine_of(model, trainable, compute_dtype=compute) as one:
        start = frozen_bits(one)
        one.train_step(rows_of(0))
        one.save(tmp_path / "a")
        one.train_step(rows_of(1))
        with engine_of(model_of(False), trainable, compute_dtype=compute) as other:
            other.load(tmp_path / "a")
            other.train_step(rows_of(1))
            for name, planes in one.store.units.items():
                one.synchronize(), other.synchronize()
                for kind, plane in planes.state().items():
                    assert torch.equal(plane, other.store.units[name].state()[kind]), (name, kind)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in start.items())
    with engine_of(tmp_path / "a", None, compute_dtype=compute) as started:
        exact = dict(started.named_parameters())
        assert all(torch.equal(exact[name], weight) for name, weight in start.items())


def test_another_set_of_frozen_parameters_is_named_at_a_resume(tmp_path: Path) -> None:
    with engine_of(model_of(False), Trainable(freeze=["lm_head"])) as engine:
        engine.save(tmp_path / "a")
    for other, words in (
        (None, "lm_head.weight was frozen when it was written and is trained now"),
        (Trainable(freeze=["lm_head", "embed"]), "embed_tokens.weight was trained when it was written"),
    ):
        with engine_of(model_of(False), other) as engine, pytest.raises(UserError, match=words):
            engine.load(tmp_path / "a")


def _ranks_work(case: RankCase, model: Any, batches: Any, trainable: Trainable, folder: Path | None = None) -> Any:
    with Fp32MeansFp64(), rank_engine_of(case, model, trainable=trainable) as engine:
        return steps_of(engine, batches)


def _ranks_save(model: Any, trainable: Trainable, folder: Path) -> None:
    group = torch.distributed.group.WORLD
    with engine_of(model, trainable, compute_dtype="bf16", threads=1, group=group) as engine:
        engine.train_step(rows_of(0))
        engine.save(folder)


@pytest.mark.parametrize("name", ["tied", "accumulation", "only-the-last-layer"])
def test_two_ranks_equal_one(name: str) -> None:
    plan = {"accumulation_steps": 2, "microbatch_rows": 1} if name == "accumulation" else {}
    trainable = (
        Trainable(only=[r"layers\.2\."]) if name == "only-the-last-layer" else Trainable(freeze=[r"\.1\.", "k_proj"])
    )
    case = RankCase(plan=plan)
    model, batches = mesh_parity.build(case.case), case.batches()
    one = _ranks_work(case, copy.deepcopy(model), batches, trainable)
    two = mesh_ranks.run(2, _ranks_work, case, model, batches, trainable)
    found = differences(two[0], one)
    assert not found, "\n".join(found)


def test_two_ranks_write_a_checkpoint_that_one_continues(tmp_path: Path) -> None:
    trainable = Trainable(only=[r"layers\.[12]\..*v_proj"])
    model = model_of(False)
    mesh_ranks.run(2, _ranks_save, model, trainable, tmp_path / "a")
    with engine_of(model, trainable, compute_dtype="bf16") as engine:
        engine.train_step(rows_of(0))
        wanted = {n: w.clone() for n, w in engine.named_parameters()}
        engine.load(tmp_path / "a")
        found = dict(engine.named_parameters())
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-2, atol=1e-3)
            if name in engine.structure.frozen:
                assert torch.equal(found[name], weight), name


@pytest.mark.parametrize(
    ("trainable", "words"),
    [
        (Trainable(freeze=["embd_tokens"]), r"train.freeze.0: 'embd_tokens' matches no parameter.*embed_tokens"),
        (Trainable(only=["("]), r"train.only.0: '\(' is no regular expression"),
        (Trainable(freeze=["."]), "every parameter of the model is frozen"),
    ],
)
def test_bad_patterns_are_one_clear_error(trainable: Trainable, words: str) -> None:
    with pytest.raises(UserError) as error:
        engine_of(model_of(True), trainable)
    import re

    assert re.search(words, str(error.value), re.S)


@dataclass(frozen=True)
class PlainSGD(OptimizerSpec):
    """Keeps no states, from which nothing can be told about what was trained."""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return ()

    def update_(self, master: torch.Tensor, grad: torch.Tensor, states: Any, scalars: Any) -> None:
        master.add_(grad, alpha=-scalars.learning_rate)


def test_an_optimizer_without_states_resumes_its_own_checkpoint(tmp_path: Path) -> None:
    for name, trainable in (("all", None), ("some", Trainable(freeze=["embed_tokens"]))):
        with engine_of(model_of(False), trainable, optim=PlainSGD(learning_rate=0.1)) as engine:
            engine.train_step(rows_of())
            engine.save(tmp_path / name)
            after = engine.train_step(rows_of(1)).loss
            engine.load(tmp_path / name)
            assert engine.train_step(rows_of(1)).loss == after
    with (
        engine_of(model_of(False), None, optim=PlainSGD(learning_rate=0.1)) as engine,
        pytest.raises(UserError, match=r"embed_tokens.weight was frozen when it was written and is trained now"),
    ):
        engine.load(tmp_path / "some")

"""LoRA in the host engine against peft on plain Hugging Face: loss, gradients, steps, and the adapter folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import mesh_ranks
from engines import host_engine
from families import BY_NAME, batch, build
from megatrain.engine.host.engine import HostEngine
from megatrain.errors import UserError
from megatrain.models.lora import Lora
from megatrain.models.templates import template_groups
from megatrain.optim.adamw import AdamW
from reference import gradient_error, reference_loss, reference_loss_and_grads

CASES: dict[str, tuple[str, Lora, dict[str, Any]]] = {
    "llama": ("llama", Lora(4, 8.0, targets=["q_proj", "v_proj", "down_proj"]), {"keep": [1], "microbatch_rows": 2}),
    "qwen3-all-linear": ("qwen3", Lora(3, 8.0, rslora=True), {"segment": 2}),
    "gpt2-conv1d": ("gpt2", Lora(4, 4.0, targets=["c_attn", "c_proj"]), {"selective": "all", "resident": ["layer.1"]}),
}


def rows_of(family: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return batch(BY_NAME[family], seed=seed, rows=4, tokens=16, kind="padded")


def engine_of(model: Any, lora: Lora, **words: Any) -> HostEngine:
    words = {"compute_dtype": "fp32", "threads": 2, "seed": 5, **words}
    return host_engine(model, device="cpu", verify="never", lora=lora, **words)


def plain_with_adapter(model: Any, folder: Path) -> Any:
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder, is_trainable=True).train()


def name_in_engine(name: str) -> str:
    return name.removeprefix("base_model.model.")


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_five_steps_equal_peft(name: str, tmp_path: Path) -> None:
    family, lora, plan = CASES[name]
    model = build(BY_NAME[family], seed=2)
    with engine_of(model, lora, optim=AdamW(1e-2, weight_decay=0.1, max_grad_norm=1.0), **plan) as engine:
        engine.train_step(rows_of(family, 9))  # B is no longer zero
        engine.save_adapter(tmp_path / "a")
        plain = plain_with_adapter(model, tmp_path / "a")
        trained = {name_in_engine(n): p for n, p in plain.named_parameters() if p.requires_grad}
        before = {n: w.clone() for n, w in engine.named_parameters()}
        assert trained.keys() == before.keys() - engine.structure.frozen
        assert all(torch.equal(before[n], p) for n, p in trained.items())

        wanted = reference_loss_and_grads(plain, rows_of(family))
        gradients = {name_in_engine(n): g for n, g in wanted.gradients.items()}
        found = engine.backward(rows_of(family))
        own = dict(engine.named_gradients())
        assert abs(found.loss - wanted.loss) < 1e-5
        assert gradient_error({n: own[n] for n in trained}, {n: gradients[n] for n in trained})[0] < 1e-5

    with engine_of(model, lora, optim=AdamW(1e-2, weight_decay=0.1, max_grad_norm=1.0, eps=1e-4), **plan) as engine:
        engine.save_adapter(tmp_path / "b")
        plain = plain_with_adapter(model, tmp_path / "b")
        trained = {name_in_engine(n): p for n, p in plain.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.1, eps=1e-4)
        base = {n: w.clone() for n, w in engine.named_parameters() if n in engine.structure.frozen}
        for step in range(5):
            engine.train_step(rows_of(family, step))
            wanted = reference_loss_and_grads(plain, rows_of(family, step))
            for n, p in plain.named_parameters():
                p.grad = wanted.gradients[n]
            torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
            optimizer.step()
        after = dict(engine.named_parameters())
        for n, p in trained.items():
            torch.testing.assert_close(after[n], p.detach(), rtol=1e-5, atol=1e-5)
        assert base and all(torch.equal(after[n], w) for n, w in base.items())

        # evaluation with and without the adapter; the folder gives peft the same loss
        engine.save_adapter(tmp_path / "c")
        found = engine.eval_step(rows_of(family))
        loaded = plain_with_adapter(model, tmp_path / "c").eval()
        assert abs(found.loss_sum / found.tokens - reference_loss(loaded, rows_of(family)).loss) < 1e-5
        with engine.adapter_off():
            found = engine.eval_step(rows_of(family))
        assert abs(found.loss_sum / found.tokens - reference_loss(model.eval(), rows_of(family)).loss) < 1e-5


def test_a_folder_is_read_under_its_own_names(tmp_path: Path) -> None:
    model = build(BY_NAME["llama"], seed=2)
    model.save_pretrained(tmp_path / "model")
    lora = CASES["llama"][1]
    with engine_of(tmp_path / "model", lora) as engine, engine_of(model, lora) as other:
        found, wanted = dict(engine.named_parameters()), dict(other.named_parameters())
        assert all(torch.equal(found[n], w) for n, w in wanted.items())
        engine.train_step(rows_of("llama"))
        engine.save_adapter(tmp_path / "a")
        tuned = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a").eval()
        result = engine.eval_step(rows_of("llama"))
        assert abs(result.loss_sum / result.tokens - reference_loss(tuned, rows_of("llama")).loss) < 1e-5
        merged = tuned.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert abs(result.loss_sum / result.tokens - reference_loss(again, rows_of("llama")).loss) < 1e-5


def test_the_start_depends_on_the_seed_and_follows_peft() -> None:
    model, lora = build(BY_NAME["llama"], seed=2), CASES["llama"][1]
    found = []
    for seed in (5, 5, 6):
        with engine_of(model, lora, seed=seed) as engine:
            found.append({n: w.clone() for n, w in engine.named_parameters() if n not in engine.structure.frozen})
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])
        if "lora_B" in name:
            assert not value.any()
        else:
            assert not torch.equal(value, found[2][name])
            bound = (1 / value.shape[1]) ** 0.5  # kaiming_uniform with a = sqrt(5)
            assert 0.8 * bound < value.abs().max() <= bound


def test_targets_that_match_nothing_are_named() -> None:
    with pytest.raises(UserError, match=r"(?s)'q_prj' matches no module of the layers.*q_proj"):
        engine_of(build(BY_NAME["llama"], seed=2), Lora(targets=["q_prj"]))


def test_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with engine_of(build(BY_NAME["llama"], seed=2), Lora(2)) as engine, pytest.raises(UserError, match="save_adapter"):
        engine.save(tmp_path / "a")


def _on_rank(model: Any, lora: Lora) -> dict[str, torch.Tensor]:
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    with engine_of(model, lora, threads=1, group=group, optim=AdamW(1e-2, eps=1e-4)) as engine:
        for step in range(2):
            engine.train_step(rows_of("llama", step))
        return {n: w.clone() for n, w in engine.named_parameters()}


def test_two_ranks_equal_one() -> None:
    model, lora = build(BY_NAME["llama"], seed=2), CASES["llama"][1]
    one, two = _on_rank(model, lora), mesh_ranks.run(2, _on_rank, model, lora)
    for name, weight in one.items():
        torch.testing.assert_close(two[0][name], weight, rtol=1e-5, atol=1e-5)
        assert torch.equal(two[1][name], two[0][name])


def test_an_adapter_folder_is_read_back(tmp_path: Path) -> None:
    model, lora = build(BY_NAME["llama"], seed=2), CASES["llama"][1]
    with engine_of(model, lora) as one, engine_of(model, lora, seed=6) as two:
        one.train_step(rows_of("llama"))
        one.save_adapter(tmp_path / "a")
        two.eval_step(rows_of("llama"))
        two.load_adapter(tmp_path / "a")
        assert two.eval_step(rows_of("llama")) == one.eval_step(rows_of("llama"))
        found = dict(two.named_parameters())
        assert all(torch.equal(found[n], w) for n, w in one.named_parameters())
    for other, words in (
        (Lora(4, targets=["q_proj"]), "adapter of other modules"),
        (Lora(2, targets=lora.targets), "has shape"),
    ):
        with engine_of(model, other) as engine, pytest.raises(UserError, match=words):
            engine.load_adapter(tmp_path / "a")


@pytest.mark.parametrize(("family", "targets"), [("llama", "all-linear"), ("gpt2", ["c_attn"])])
def test_equal_layers_still_run_one_compiled_function(family: str, targets: str | list[str]) -> None:
    with engine_of(build(BY_NAME[family], seed=3), Lora(4, targets=targets)) as engine:
        layers = engine.structure.model.get_submodule(engine.structure.layers_name)
        assert set(template_groups([*layers])) == {0}

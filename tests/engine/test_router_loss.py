"""The auxiliary loss of routers equals that of plain Hugging Face, value and gradients, however a step is cut."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import mesh_parity
from engines import host_engine
from families import BY_NAME, FAMILIES, batch, build
from fp64 import Fp32MeansFp64
from host_ranks import RankCase, on_ranks, steps_of
from host_ranks import engine_of as engine_of_ranks
from megatrain.engine.batches import BatchShape
from megatrain.engine.host.engine import HostEngine
from megatrain.errors import UserError
from megatrain.models.routers import COEFFICIENTS, router_loss
from reference import gradient_error

COEFFICIENT = 0.5
"""Large, so that a wrong gradient of the auxiliary loss shows beside that of the cross entropy."""
WITH_LOSS = (
    "mixtral qwen2_moe qwen3_moe olmoe flex_olmo granitemoe granitemoeshared granitemoe_swa gpt_oss ernie4_5_moe phimoe jetmoe "
    "minimax_m2 laguna qwen3_next qwen3_5_moe_text minimax jamba granitemoehybrid"
).split()
FEW = ("qwen3_moe", "mixtral", "jetmoe", "gpt_oss")
"""A dense layer among those with experts, jitter, two routers in a layer, biases."""


def engine_of(model: torch.nn.Module, **options: Any) -> HostEngine:
    return host_engine(model, device="cpu", compute_dtype="fp32", threads=1, verify="never", **options)


def plain(
    model: Any, rows: dict[str, torch.Tensor], coefficient: float
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """(loss, auxiliary loss, gradients) by Hugging Face alone."""
    model = copy.deepcopy(model)
    setattr(model, next(name for name in COEFFICIENTS if hasattr(model, name)), coefficient)
    output = model(**rows, output_router_logits=True, use_cache=False)
    output.loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return output.loss.item(), output.aux_loss.item(), gradients


def assert_same(name: str, kind: Any = "masked", rows: int = 3, experts: str | None = None, **options: Any) -> None:
    family = BY_NAME[name]
    model = build(family, seed=0)
    if experts is not None:
        model.set_experts_implementation(experts)
    given = batch(family, seed=1, rows=rows, tokens=24, kind=kind)
    loss, auxiliary, gradients = plain(model, given, COEFFICIENT)
    with engine_of(model, router_loss=COEFFICIENT, head_chunk_tokens=16, **options) as engine:
        result = engine.backward(given)
        got = dict(engine.named_gradients())
        if options.get("compile") == "on":
            assert engine.counters()["compiled_layers"] == model.config.num_hidden_layers
    assert result.loss is not None
    assert result.routing["aux_loss"] == pytest.approx(auxiliary, rel=1e-5)
    assert result.loss + COEFFICIENT * result.routing["aux_loss"] == pytest.approx(loss, rel=1e-5)
    error, worst = gradient_error({n: g for n, g in got.items() if n in gradients}, gradients)
    assert error < 1e-5, f"{worst}: {error:.1e}"


@pytest.mark.parametrize("name", WITH_LOSS)
def test_loss_and_gradients_equal_plain_hugging_face(name: str) -> None:
    """In two microbatches, with padding that routers do not count."""
    assert_same(name, microbatch_rows=2)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "padded"},  # without a mask every token counts
        {"rows": 5, "accumulation_steps": 3},  # the first backward needs the counts of the last forward
        {"accumulation_steps": 2, "microbatch_rows": 1, "segment": 2, "rows": 4},
        {"keep": "all", "microbatch_rows": 2},
        {"keep": [1], "offload_input": [0, 2], "weight_slots": 4},
        {"keep_attention": "all"},
        {"resident": "all"},
    ],
    ids=str,
)
def test_every_way_to_cut_a_step_gives_the_same_gradients(name: str, options: dict[str, Any]) -> None:
    assert_same(name, **options)


def test_mlps_in_chunks_of_tokens_stay_whole_where_the_loss_enters_them() -> None:
    assert_same("qwen3_moe", mlp_chunk_tokens=8)


def test_the_list_of_families_with_a_loss_is_complete() -> None:
    has = []
    for family in FAMILIES:
        try:
            found = router_loss(build(family, seed=0), True)
        except UserError:
            continue
        if found is not None:
            has.append(family.name)
    assert sorted(has) == sorted(WITH_LOSS)


def test_the_models_config_is_the_default_and_the_argument_overrides_it(tmp_path: Path) -> None:
    model = build(BY_NAME["mixtral"], seed=0)
    rows = batch(BY_NAME["mixtral"], seed=1, rows=2, tokens=16)

    def result(given: Any, setting: bool | float | None) -> dict[str, float]:
        with engine_of(given, router_loss=setting) as engine:
            found = engine.backward(rows)
            gradient = dict(engine.named_gradients())["model.layers.0.mlp.gate.weight"]
            return {**found.routing, "gradient": gradient.norm().item()}

    off = result(model, None)
    assert "aux_loss" not in off
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.25
    on = result(model, None)
    assert on["aux_loss"] > 0
    assert on["gradient"] != off["gradient"]
    assert result(model, 0.25) == on
    assert result(model, False) == off
    assert result(model, True) == on
    assert result(model, 0.5)["gradient"] != on["gradient"]
    model.config.router_aux_loss_coef = 0.25
    model.save_pretrained(tmp_path)
    with HostEngine(tmp_path, device="cpu") as engine:  # the parity check compares the auxiliary loss as well
        assert engine.router_loss is not None and engine.router_loss.coefficient == 0.25


@pytest.mark.parametrize("name", ["deepseek_v3", "llama"])
def test_a_family_without_one_refuses_the_setting_by_name(name: str) -> None:
    with pytest.raises(UserError, match=f"model.router_aux_loss: the {name} family has no auxiliary loss"):
        engine_of(build(BY_NAME[name], seed=0), router_loss=True)
    model = build(BY_NAME[name], seed=0)
    model.config.output_router_logits = True  # Hugging Face adds nothing then
    with engine_of(model) as engine:
        assert engine.router_loss is None


def test_a_formula_of_its_own_is_refused() -> None:
    family = dataclasses.replace(BY_NAME["doge"], overrides={"is_moe": True, "num_experts": 16})
    with pytest.raises(UserError, match="doge family has a formula that is not supported"):
        engine_of(build(family, seed=0), router_loss=True)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("plan", [{"microbatch_rows": 1}, {"accumulation_steps": 2}], ids=str)
def test_ranks_compute_what_plain_hugging_face_computes(world: int, plan: dict[str, Any]) -> None:
    """In fp64. Seven rows: the last rank repeats one, which its routers do not count."""
    case = RankCase("mixtral", tied=False, kind="masked", plan={"router_loss": COEFFICIENT, **plan})
    model, steps = mesh_parity.build(case.case), case.batches()
    with Fp32MeansFp64():
        _, _, gradients = plain(model, steps[0], COEFFICIENT)
        with engine_of_ranks(case, model) as engine:
            alone = steps_of(engine, steps)
    found = on_ranks(case, world)
    for run in (found, alone):
        error, worst = gradient_error(run.gradients, gradients)
        assert error < 1e-11, f"{worst}: {error:.1e}"
    assert found.losses == pytest.approx(alone.losses, rel=1e-12)
    error, worst = gradient_error(found.weights, alone.weights)
    assert error < 1e-11, f"{worst}: {error:.1e}"


def test_resume_is_exact(tmp_path: Path) -> None:
    family = BY_NAME["qwen3_moe"]
    options = {"router_loss": 0.1, "accumulation_steps": 2}
    steps = [batch(family, seed=s, rows=4, tokens=16, kind="packed") for s in range(4)]
    with engine_of(build(family, seed=0), **options) as engine:
        whole = [engine.train_step(rows) for rows in steps]
        weights = dict(engine.named_parameters())
    with engine_of(build(family, seed=0), **options) as engine:
        for rows in steps[:2]:
            engine.train_step(rows)
        engine.save(tmp_path / "checkpoint")
    with engine_of(build(family, seed=3), **options) as engine:
        engine.load(tmp_path / "checkpoint")
        rest = [engine.train_step(rows) for rows in steps[2:]]
        resumed = dict(engine.named_parameters())
    assert [(r.loss, r.grad_norm, r.routing) for r in rest] == [(r.loss, r.grad_norm, r.routing) for r in whole[2:]]
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss", "aria_text"])
def test_the_load_of_the_experts_is_what_the_family_chooses(name: str) -> None:
    """Also where a correction bias decides, and padding left out."""
    family = BY_NAME[name]
    rows = batch(family, seed=1, rows=3, tokens=24, kind="masked")
    model, loads = build(family, seed=0), []

    def hook(module: Any, args: Any) -> None:
        kept = args[1][rows["attention_mask"].reshape(-1).bool()]
        loads.append(torch.bincount(kept.reshape(-1), minlength=module.num_experts))

    twin = copy.deepcopy(model)
    for module in twin.modules():
        if hasattr(module, "num_experts") and type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(hook)
    twin(**rows, use_cache=False)
    assert loads
    with engine_of(model, microbatch_rows=2) as engine:
        routing = engine.backward(rows).routing
    tokens = int(rows["attention_mask"].sum())
    assert routing["max_load"] == pytest.approx(max(float(n.max() / n.double().mean()) for n in loads))
    assert routing["max_share"] == pytest.approx(max(int(n.max()) for n in loads) / tokens)
    assert routing["idle"] == pytest.approx(torch.cat([n == 0 for n in loads]).double().mean().item())


def test_correction_biases_follow_the_load_and_resume_exactly(tmp_path: Path) -> None:
    family, speed = BY_NAME["deepseek_v3"], 0.01
    steps = [batch(family, seed=s, rows=3, tokens=16, kind="masked") for s in range(4)]
    model = build(family, seed=0)
    names = [name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias")]
    wanted = {name: model.get_buffer(name).clone() for name in names}
    loads: list[torch.Tensor] = []
    kept = steps[0]["attention_mask"].reshape(-1).bool()
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if type(module).__name__ == "DeepseekV3Experts":
            module.register_forward_pre_hook(
                lambda m, args: loads.append(
                    torch.bincount(args[1][kept].reshape(-1), minlength=m.num_experts).double()
                )
            )
    twin(**steps[0], use_cache=False)
    for name, load in zip(names, loads, strict=True):
        wanted[name] += speed * torch.sign(load.mean() - load).float()

    def biases(engine: HostEngine) -> dict[str, torch.Tensor]:
        return {name: engine.buffers[name].clone() for name in names}

    with engine_of(model, router_bias_speed=speed) as engine:
        engine.train_step(steps[0])
        first = biases(engine)
        assert all(torch.equal(first[name], wanted[name]) for name in names)
        engine.train_step(steps[1])
        engine.save(tmp_path / "checkpoint")
        last = [engine.train_step(rows).loss for rows in steps[2:]]
        whole = biases(engine)
        assert any(not torch.equal(whole[name], first[name]) for name in names)
    with engine_of(build(family, seed=3), router_bias_speed=speed) as engine:
        engine.load(tmp_path / "checkpoint")
        assert [engine.train_step(rows).loss for rows in steps[2:]] == last
        resumed = biases(engine)
    assert all(torch.equal(whole[name], resumed[name]) for name in names)
    with engine_of(model) as engine:  # off: as in transformers
        engine.train_step(steps[0])
        assert all(torch.equal(engine.buffers[name], model.get_buffer(name)) for name in names)
    with pytest.raises(UserError, match="router_bias_update_speed: the qwen3_moe family has no"):
        engine_of(build(BY_NAME["qwen3_moe"], seed=0), router_bias_speed=speed)


def test_padding_to_the_shape_of_a_run_is_not_counted() -> None:
    family = BY_NAME["qwen3_moe"]
    rows = batch(family, seed=1, rows=2, tokens=16, kind="packed")
    rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    rows["attention_mask"][:, -1] = 0
    with engine_of(build(family, seed=0), router_loss=1.0) as engine:
        plain_result = engine.backward(rows)
        engine._shapes = (BatchShape(3, (24,), packed=True), None)
        padded = engine.backward(rows)
    assert padded.routing == pytest.approx(plain_result.routing, rel=1e-6)


@pytest.mark.parametrize("policy", [{}, {"keep": "all"}, {"selective": "all"}, {"keep_attention": "all"}], ids=str)
def test_compiled_layers_return_what_their_routers_did(policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a GPU, without the last stage of the compiler."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **words: compile_(f, backend="aot_eager", **words))
    assert_same("qwen3_moe", microbatch_rows=2, rows=4, compile="on", experts="eager", **policy)


def test_without_the_loss_nothing_changes_a_bit() -> None:
    """Watching routers leaves loss and gradients as a model computes them whose routers are not watched."""
    family = BY_NAME["qwen3_moe"]
    rows, found = batch(family, seed=1, rows=3, tokens=24, kind="masked"), []
    for watched in (True, False):
        with engine_of(build(family, seed=0), microbatch_rows=2) as engine:
            if not watched:
                engine._device_side.shell.watched = frozenset()
            result = engine.backward(rows)
            found.append((result.loss, dict(engine.named_gradients())))
            assert bool(result.routing) == watched
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], gradient) for name, gradient in found[1][1].items())

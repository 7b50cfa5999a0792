"""Training steps of the host engine on the CPU: sums, guards, isolation, recovery from errors."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

from engines import host_engine
from families import BY_NAME, batch, build
from megatrain.device.offload import InputStore
from megatrain.engine.host import rng as randomness
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.host.gradients import GradientFlow
from megatrain.engine.host.optimizer import LossScale
from megatrain.errors import EngineClosed, NumericStop, PlanRefused, UserError
from megatrain.models.shell import Shell
from megatrain.optim.adamw import AdamW
from reference import ReferenceTrainer, gradient_error, reference_loss, reference_loss_and_grads

LLAMA = BY_NAME["llama"]
SMALL = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def engine_of(model: torch.nn.Module, **options: Any) -> HostEngine:
    options = {"compute_dtype": "fp32", "threads": 2, "verify": "never", **options}
    return host_engine(model, device="cpu", **options)


def rows_of(seed: int = 0, rows: int = 4, tokens: int = 16, kind: Any = "padded") -> dict[str, torch.Tensor]:
    return batch(LLAMA, seed=seed, rows=rows, tokens=tokens, kind=kind)


def weights_of(engine: HostEngine) -> dict[str, torch.Tensor]:
    return dict(engine.named_parameters())


def state_bytes(engine: HostEngine) -> list[bytes]:
    """Every byte of the state: hi, lo, m, v of every unit."""
    engine.synchronize()
    planes = [tuple(p.state().values()) for p in engine.store.units.values()]
    return [t.view(torch.uint8).numpy().tobytes() for t in itertools.chain(*planes) if t is not None]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# ------------------------------------------------------------------ sums


@pytest.mark.parametrize(("accumulation_steps", "microbatch_rows"), [(1, 8), (2, 4), (8, 1), (4, 1), (3, 2)])
def test_accumulation_equals_one_large_batch(accumulation_steps: int, microbatch_rows: int) -> None:
    """Loss, norm, gradients and weights of 1 x 8, 2 x 4, 8 x 1 rows of unequal lengths are those of plain HF."""
    model, data = build(LLAMA, seed=0), rows_of(rows=8)
    want = reference_loss_and_grads(copy.deepcopy(model), data)
    reference = ReferenceTrainer(copy.deepcopy(model), learning_rate=1e-4, eps=1e-4)
    _, want_norm = reference.step(data)
    optim = AdamW(learning_rate=1e-4, eps=1e-4)
    with engine_of(
        model, accumulation_steps=accumulation_steps, microbatch_rows=microbatch_rows, optim=optim, gradient_slabs=2
    ) as engine:
        result = engine.train_step(data)
        error, name = gradient_error(dict(engine.named_gradients()), want.gradients)
        weights = weights_of(engine)
    assert result.loss == pytest.approx(want.loss, rel=1e-6)
    assert result.grad_norm == pytest.approx(want_norm, rel=1e-5)
    assert error < 1e-5, name
    for name, parameter in reference.model.named_parameters():
        assert float((weights[name] - parameter.detach()).norm() / parameter.detach().norm()) < 1e-6, name


def test_a_partial_step_is_divided_by_its_own_token_count() -> None:
    model, data = build(LLAMA, seed=0), rows_of(rows=3)
    want = reference_loss_and_grads(copy.deepcopy(model), data)
    with engine_of(model, accumulation_steps=2, microbatch_rows=1) as engine:
        result = engine.backward(data)
    assert (result.tokens, result.loss) == (want.tokens, pytest.approx(want.loss, rel=1e-6))


def test_a_step_without_targets_changes_nothing() -> None:
    data = rows_of()
    data["labels"] = torch.full_like(data["labels"], -100)
    with engine_of(build(LLAMA, seed=0)) as engine:
        engine.train_step(rows_of(1))
        before = state_bytes(engine)
        result = engine.train_step(data)
        assert (result.loss, result.grad_norm, result.tokens, result.skipped) == (None, None, 0, "no target tokens")
        assert state_bytes(engine) == before
        assert engine.eval_step(data).tokens == 0


def test_some_rows_without_targets_do_not_disturb_the_others() -> None:
    data = rows_of(rows=4)
    data["labels"][1] = -100
    model = build(LLAMA, seed=0)
    want = reference_loss_and_grads(copy.deepcopy(model), data)
    with engine_of(model, accumulation_steps=4, microbatch_rows=1) as engine:
        result = engine.backward(data)
        error, name = gradient_error(dict(engine.named_gradients()), want.gradients)
    assert result.loss == pytest.approx(want.loss, rel=1e-6)
    assert error < 1e-5, name


def test_rows_as_many_as_tokens_are_cut_along_the_rows() -> None:
    """Sizes do not tell rows from tokens here; probing does."""
    model, data = build(LLAMA, seed=0), rows_of(rows=12, tokens=12, kind="packed")
    want = reference_loss_and_grads(copy.deepcopy(model), data)
    with engine_of(model, microbatch_rows=5) as engine:
        result = engine.backward(data)
        error, name = gradient_error(dict(engine.named_gradients()), want.gradients)
    assert result.loss == pytest.approx(want.loss, rel=1e-6)
    assert error < 1e-5, name


# ------------------------------------------------------------------ precision


def test_tiny_learning_rates_move_bf16_weights_as_fp32_would() -> None:
    """100 steps at a learning rate of 1e-6, from weights that are bf16 values: a bf16 master would lose every step."""
    model = build(LLAMA, seed=0).bfloat16().float()
    data, optim = rows_of(rows=2, tokens=8), AdamW(learning_rate=1e-6)
    reference = ReferenceTrainer(copy.deepcopy(model), learning_rate=1e-6)
    with engine_of(model, compute_dtype="bf16", grad_transport="fp32", optim=optim) as engine:
        for _ in range(100):
            reference.step(data)
            engine.train_step(data)
        weights = weights_of(engine)
    start = dict(model.named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    moved, wanted = (
        weights[name] - start[name].detach(),
        reference.model.get_parameter(name).detach() - start[name].detach(),
    )
    assert float((moved != 0).float().mean()) > 0.99
    assert float((moved - wanted).norm() / wanted.norm()) < 0.2, (
        "bf16 rounding turns the sign of near-zero gradients only"
    )


def test_buffers_keep_their_type_and_long_positions_match() -> None:
    """Rotary tables stay fp32 under bf16 compute: the loss at positions around 32k equals plain HF's."""
    model = build(LLAMA, seed=0)
    data = rows_of(rows=2, tokens=16, kind="plain")
    data["position_ids"] = torch.arange(32752, 32768).expand(2, 16).contiguous()
    with engine_of(model) as engine:
        result = engine.eval_step(data)
    want = reference_loss(model, data)
    assert result.loss_sum / result.tokens == pytest.approx(want.loss, rel=1e-6)
    with engine_of(model, compute_dtype="bf16") as engine:
        tables = [b for n, b in engine.buffers.items() if n.endswith("inv_freq")]
        assert tables
        assert all(table.dtype == torch.float32 for table in tables)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_non_finite_step_changes_no_byte(where: str, compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(build(LLAMA, seed=0), compute_dtype=compute) as engine:
        engine.train_step(rows_of(0))
        before = state_bytes(engine)
        with monkeypatch.context() as patch:
            _break_numbers(where, patch)
            result = engine.train_step(rows_of(1))
        assert result.skipped is not None
        assert state_bytes(engine) == before
        assert engine.updates == 1
        assert engine.train_step(rows_of(2)).skipped is None


def _break_numbers(where: str, patch: pytest.MonkeyPatch) -> None:
    if where == "loss":
        logits = Shell.logits
        patch.setattr(Shell, "logits", lambda *a: logits(*a) * float("inf"))
    else:
        send = GradientFlow.send_layer

        def poisoned(flow: GradientFlow, total: Any) -> None:
            total.flat[3] = float("inf")
            send(flow, total)

        patch.setattr(GradientFlow, "send_layer", poisoned)


def test_fp16_overflow_lowers_the_loss_scale_and_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.engine.host.engine.LossScale", lambda: LossScale(scale=2.0**32))
    with engine_of(build(LLAMA, seed=0), compute_dtype="fp16") as engine:
        before = state_bytes(engine)
        results = [engine.train_step(rows_of(0)) for _ in range(40)]
        assert results[0].skipped is not None
        assert results[0].loss_scale == 2.0**32
        applied = [r for r in results if r.skipped is None]
        assert applied
        assert applied[0].loss_scale < 2.0**32
        assert state_bytes(engine) != before


# ------------------------------------------------------------------ randomness


def test_a_step_seeds_no_device_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as torch.manual_seed, without seeding other devices, which nobody would restore."""
    asked = []
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        monkeypatch.setattr(kind, "manual_seed_all", lambda seed: asked.append(seed))
    with randomness.seeded(torch.device("cpu"), 0, 0):
        drawn = torch.rand(3)
    assert asked == []
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))


def test_dropout_of_the_forward_is_replayed_in_the_recompute() -> None:
    """Plain HF draws the same masks from the same seed, and its backward uses those of its forward."""
    family = BY_NAME["gpt2"]
    model, data = build(family, seed=0, dropout=0.3), batch(family, seed=0, rows=3, tokens=16)
    with randomness.seeded(torch.device("cpu"), 5, 0):
        want = reference_loss_and_grads(copy.deepcopy(model), data)
    for options in ({}, {"segment": 2}):
        with engine_of(model, seed=5, **options) as engine:
            result = engine.backward(data)
            error, name = gradient_error(dict(engine.named_gradients()), want.gradients)
        assert result.loss == pytest.approx(want.loss, rel=1e-6), options
        assert error < 1e-5, (options, name)


def test_router_jitter_is_replayed_in_the_recompute() -> None:
    family = BY_NAME["mixtral"]
    model, data = build(family, seed=0, jitter=0.2), batch(family, seed=0, rows=2, tokens=16)
    with randomness.seeded(torch.device("cpu"), 5, 0):
        want = reference_loss_and_grads(copy.deepcopy(model), data)
    with engine_of(model, seed=5) as engine:
        result = engine.backward(data)
        error, name = gradient_error(dict(engine.named_gradients()), want.gradients)
    assert result.loss == pytest.approx(want.loss, rel=1e-6)
    assert error < 1e-5, name


@pytest.mark.parametrize("microbatch_rows", [None, 1])
def test_evaluation_between_two_steps_changes_nothing(microbatch_rows: int | None) -> None:
    """Bit for bit, with dropout; also if the evaluation is the first to probe the row axes."""
    family = BY_NAME["gpt2"]
    weights = []
    for evaluate in (False, True):
        optim = AdamW(learning_rate=1e-3)
        with engine_of(build(family, seed=0, dropout=0.3), optim=optim, microbatch_rows=microbatch_rows) as engine:
            for step in range(3):
                if evaluate:
                    engine.eval_step(batch(family, seed=9, rows=5, tokens=16))
                    torch.rand(7)
                engine.train_step(batch(family, seed=step, rows=3, tokens=16))
            weights.append(weights_of(engine))
    assert_same(*weights)


def test_evaluation_equals_plain_hugging_face_in_evaluation_mode() -> None:
    """The sum over chunks of tokens is the loss."""
    family = BY_NAME["gpt2"]
    model, data = build(family, seed=0, dropout=0.3), batch(family, seed=0, rows=3, tokens=16, kind="padded")
    want = reference_loss(copy.deepcopy(model).eval(), data)
    with engine_of(model, head_chunk_tokens=7, microbatch_rows=2) as engine:
        result = engine.eval_step(data)
    assert result.tokens == want.tokens
    assert result.loss_sum / result.tokens == pytest.approx(want.loss, rel=1e-6)


# ------------------------------------------------------------------ routes


def test_a_fused_update_equals_one_from_a_gradient_plane() -> None:
    weights = []
    for options in ({}, {"gradient_plane": False, "gradient_slabs": 2}):
        optim = AdamW(learning_rate=1e-3, max_grad_norm=None)
        with engine_of(build(LLAMA, seed=0), optim=optim, compute_dtype="bf16", **options) as engine:
            for step in range(3):
                engine.train_step(rows_of(step))
            weights.append(weights_of(engine))
    assert_same(*weights)


def test_without_a_gradient_plane_a_bad_step_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    optim = AdamW(max_grad_norm=None)
    engine = engine_of(build(LLAMA, seed=0), optim=optim, gradient_plane=False)
    _break_numbers("gradient", monkeypatch)
    with pytest.raises(NumericStop, match="resume from the last checkpoint"):
        engine.train_step(rows_of())
    with pytest.raises(EngineClosed):
        engine.train_step(rows_of())


def test_any_number_of_slots_gives_the_same_bits() -> None:
    weights = []
    for slots in (2, 3, 64):
        with engine_of(build(LLAMA, seed=0), weight_slots=slots, optim=AdamW(learning_rate=1e-3)) as engine:
            for step in range(3):
                engine.train_step(rows_of(step))
            weights.append(weights_of(engine))
    assert_same(weights[0], weights[1])
    assert_same(weights[0], weights[2])


@pytest.mark.parametrize("base", [{}, {"microbatch_rows": 2}, {"accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"resident": "all"},
        {"resident": ("embedding", "layer.0", "layer.2")},
        {"keep": "all"},
        {"keep": (1, 3), "selective": (0,), "resident": ("layer.1", "head")},
        {"offload_input": "all"},
        {"offload_input": (1, 2), "keep": (0,)},
        {"offload_input": "all", "keep": (0, 1, 3), "selective": (2,), "resident": ("layer.0", "layer.1")},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "gemma3n_text"])
def test_placement_and_activation_policy_do_not_change_a_bit(
    name: str, base: dict[str, Any], options: dict[str, Any]
) -> None:
    family, runs = BY_NAME[name], []
    for chosen in ({}, options):
        optim = AdamW(learning_rate=1e-3)
        with engine_of(build(family, seed=0), optim=optim, compute_dtype="bf16", **base, **chosen) as engine:
            losses = [engine.train_step(batch(family, seed=s, rows=4, tokens=16, kind="padded")).loss for s in range(3)]
            runs.append((losses, weights_of(engine)))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])


@pytest.mark.parametrize("kept", [(), "all"])
@pytest.mark.parametrize("microbatch_rows", [2, 4])
def test_an_offloaded_input_is_freed_at_once(microbatch_rows: int, kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer's input is offloaded, only the input before it may still be alive on the device."""
    sent: list[StorageWeakRef] = []
    alive: list[int] = []
    put = InputStore.put

    def watched(store: InputStore, layer: int, tensor: torch.Tensor) -> None:
        put(store, layer, tensor)
        alive.append(sum(not storage.expired() for storage in sent))
        sent.append(StorageWeakRef(tensor.untyped_storage()))

    monkeypatch.setattr(InputStore, "put", watched)
    with engine_of(build(LLAMA, seed=0), offload_input="all", keep=kept, microbatch_rows=microbatch_rows) as engine:
        engine.train_step(rows_of())
    assert len(sent) >= 3
    assert max(alive) <= 1


def test_planes_take_twelve_bytes_a_parameter() -> None:
    for compute in ("bf16", "fp32"):
        with engine_of(build(LLAMA, seed=0), compute_dtype=compute) as engine:
            memory = engine.memory()
            planes = sum(memory.get(f"host_{kind}", 0) for kind in ("hi", "lo", "m", "v"))
            units = len(engine.structure.units)
            padded = sum(unit.layout.numel for unit in engine.structure.units)
            assert 12 * padded <= planes <= 12 * padded + 4 * 4096 * (units + 1)
            assert padded - engine.structure.param_count < 64 * sum(
                len(u.layout.entries) for u in engine.structure.units
            )


# ------------------------------------------------------------------ faults


def test_an_error_of_a_background_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a second, with its traceback."""
    engine = engine_of(build(LLAMA, seed=0))

    def dies(*_: Any) -> None:
        raise ZeroDivisionError("in the optimizer thread")

    monkeypatch.setattr("megatrain.optim.kernels.adamw_whole", dies)
    engine.train_step(rows_of(0))
    started = time.perf_counter()
    with pytest.raises(ZeroDivisionError, match="in the optimizer thread") as caught:
        engine.train_step(rows_of(1))
    assert time.perf_counter() - started < 1.0
    assert any(entry.name == "dies" for entry in caught.traceback)
    engine.close()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 3, 5, 6])
def test_after_an_error_in_the_middle_of_a_step_the_engine_goes_on(
    error: type[BaseException], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forward and backward calls of a layer; the next steps equal those of an undisturbed run, bit for bit."""
    weights = []
    for disturbed in (False, True):
        with engine_of(build(LLAMA, seed=0), optim=AdamW(learning_rate=1e-3)) as engine:
            engine.train_step(rows_of(0))
            if disturbed:
                with monkeypatch.context() as patch:
                    _fail_at(call, error, patch)
                    with pytest.raises(error):
                        engine.train_step(rows_of(7))
            engine.train_step(rows_of(1))
            weights.append(weights_of(engine))
    assert_same(*weights)


def _fail_at(call: int, error: type[BaseException], patch: pytest.MonkeyPatch) -> None:
    counter, compute = itertools.count(1), Shell.call_layer

    def failing(*args: Any) -> Any:
        if next(counter) == call:
            raise error("injected")
        return compute(*args)

    patch.setattr(Shell, "call_layer", failing)


@pytest.mark.parametrize("place", ["call_layer", "logits", "begin_layer", "hidden_states", "send_edge"])
def test_after_oom_anywhere_in_a_step_it_is_retried_with_a_reduced_plan(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At every call of that kind: the run equals, bit for bit, one that started with the reduced plan."""
    options = {"microbatch_rows": 4, "head_chunk_tokens": 16, "optim": AdamW(learning_rate=1e-3)}
    with engine_of(build(LLAMA, seed=0), **{**options, "microbatch_rows": 2}) as planned:
        results = [planned.train_step(rows_of(step)).loss for step in range(2)]
        want = weights_of(planned)
    for call in itertools.count(1):
        with engine_of(build(LLAMA, seed=0), **options) as engine, monkeypatch.context() as patch:
            owner: type = GradientFlow if place in ("begin_layer", "send_edge") else Shell
            counter, real = itertools.count(1), getattr(owner, place)

            def failing(*args: Any, counter: Any = counter, real: Any = real, call: int = call) -> Any:
                if next(counter) == call:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                return real(*args)

            patch.setattr(owner, place, failing)
            with caplog.at_level("WARNING"):
                losses = [engine.train_step(rows_of(0)).loss]
            if next(counter) <= call:
                assert call > 1, "nothing was injected"
                return
            assert "batch.microbatch_rows: 2" in caplog.text
            losses.append(engine.train_step(rows_of(1)).loss)
            assert losses == results
            assert_same(weights_of(engine), want)


def test_where_no_reduction_helps_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(build(LLAMA, seed=0), keep="all", head_chunk_tokens=128) as engine:

        def always(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        with monkeypatch.context() as patch:
            patch.setattr(Shell, "logits", always)
            with pytest.raises(PlanRefused, match="no plan needs less device memory"):
                engine.train_step(rows_of(0))
        assert engine.plan.activations == dict.fromkeys(range(4), "recompute")
        assert engine.plan.offload_input == frozenset(range(4))
        assert engine.train_step(rows_of(0)).skipped is None


def test_gradients_of_an_fp16_step_come_without_the_loss_scale() -> None:
    gradients = []
    for step in (lambda engine: engine.train_step(rows_of()), lambda engine: engine.backward(rows_of())):
        with engine_of(build(LLAMA, seed=0), compute_dtype="fp16") as engine:
            step(engine)
            gradients.append(dict(engine.named_gradients()))
    assert_same(*gradients)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, "x"])
def test_a_bad_learning_rate_is_refused_and_changes_nothing(rate: Any) -> None:
    with engine_of(build(LLAMA, seed=0)) as engine:
        before = state_bytes(engine)
        with pytest.raises(UserError, match="learning_rate"):
            engine.train_step(rows_of(), learning_rate=rate)
        assert (engine.step, engine.updates) == (0, 0)
        assert state_bytes(engine) == before


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (torch.nn.Linear(2, 2), "expected a causal language model.*type Linear"),
        (torch.nn.DataParallel(build(LLAMA, seed=0)), "expected a causal language model.*type DataParallel"),
        (7, "expected a causal language model.*type int"),
        (build(LLAMA, seed=0).model, "LlamaModel in memory: has no language modelling head"),
        (transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), "'bert' is an encoder"),
        (transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL)), "'t5' is an encoder-decoder model"),
    ],
    ids=["linear", "wrapped", "number", "headless", "bert", "t5"],
)
def test_other_models_than_causal_language_models_are_refused(model: Any, what: str) -> None:
    """Each by its name; a masked language model would silently be trained for another task."""
    with pytest.raises(UserError, match=what):
        engine_of(model)


def test_a_frozen_layer_is_trained_around() -> None:
    model = build(LLAMA, seed=0)
    for parameter in model.get_submodule("model.layers.1").parameters():
        parameter.requires_grad_(False)
    want = reference_loss_and_grads(copy.deepcopy(model), rows_of())
    with engine_of(model, optim=AdamW(learning_rate=1e-3)) as engine:
        assert engine.train_step(rows_of()).loss == pytest.approx(want.loss, rel=1e-6)
        weights = weights_of(engine)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter) == name.startswith("model.layers.1."), name


def test_a_second_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    computing, let_go, compute = threading.Event(), threading.Event(), Shell.call_layer

    def held(*args: Any) -> Any:
        computing.set()
        assert let_go.wait(20)
        return compute(*args)

    with engine_of(build(LLAMA, seed=0)) as engine, ThreadPoolExecutor(1) as other, monkeypatch.context() as patch:
        patch.setattr(Shell, "call_layer", held)
        step = other.submit(engine.train_step, rows_of())
        assert computing.wait(20)
        with pytest.raises(UserError, match="one thread at a time"):
            engine.train_step(rows_of())
        let_go.set()
        assert step.result(20).skipped is None
        assert engine.train_step(rows_of()).skipped is None


def test_a_checkpoint_of_a_model_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    with engine_of(build(LLAMA, seed=0)) as engine:
        engine.save(tmp_path / "saved")
    other = build(LLAMA, seed=0)
    other.config.rms_norm_eps = 0.1
    with engine_of(other) as engine:
        with pytest.raises(UserError, match=r"rms_norm_eps is 1e-06 there and 0\.1 here"):
            engine.load(tmp_path / "saved")
        assert engine.train_step(rows_of()).skipped is None
    with engine_of(build(LLAMA, seed=1)) as engine:
        engine.load(tmp_path / "saved")


def test_a_closed_engine_refuses_every_call() -> None:
    engine = engine_of(build(LLAMA, seed=0))
    engine.close()
    engine.close()
    for use in (
        lambda: engine.train_step(rows_of()),
        lambda: engine.eval_step(rows_of()),
        lambda: list(engine.named_parameters()),
    ):
        with pytest.raises(EngineClosed):
            use()


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda b: b.pop("labels"), "missing keys"),
        (lambda b: b.update(tokens=b["labels"]), "unknown keys"),
        (lambda b: b.update(labels=b["labels"][:, :4]), "labels"),
        (lambda b: b.update(input_ids=b["input_ids"].int()), "int64"),
        (lambda b: b["input_ids"].__setitem__((1, 2), 10_000), r"input_ids'\]\[1, 2\].*10000"),
        (lambda b: b["labels"].__setitem__((0, 3), -7), r"labels'\]\[0, 3\].*-7"),
        (lambda b: b.update({k: v[:0] for k, v in b.items()}), "at least one row"),
    ],
)
def test_a_bad_batch_is_refused_and_changes_nothing(change: Any, what: str) -> None:
    data = rows_of()
    change(data)
    with engine_of(build(LLAMA, seed=0)) as engine:
        before = state_bytes(engine)
        with pytest.raises(UserError, match=what):
            engine.train_step(data)
        assert state_bytes(engine) == before
        assert engine.train_step(rows_of()).skipped is None


def test_positions_that_do_not_restart_with_the_documents_are_refused() -> None:
    data = rows_of(kind="packed")
    data["position_ids"] = torch.arange(16).expand(4, 16).contiguous()
    with engine_of(build(LLAMA, seed=0)) as engine, pytest.raises(UserError, match="restart"):
        engine.train_step(data)


@pytest.mark.parametrize(("name", "isolates"), [("llama", True), ("gpt_oss", False)])
def test_packed_rows_are_refused_for_a_family_that_mixes_documents(name: str, isolates: bool) -> None:
    """At the first packed batch, also of a model in memory; other rows are trained."""
    family = BY_NAME[name]
    packed = batch(BY_NAME["llama"], seed=0, rows=2, tokens=16, kind="packed")
    with engine_of(build(family, seed=0), verify="auto") as engine:
        if isolates:
            assert engine.train_step(packed).skipped is None
            return
        with pytest.raises(UserError, match="packing: false"):
            engine.train_step(packed)
        assert engine.train_step(batch(family, seed=0, rows=2, tokens=16)).skipped is None


def test_document_ids_alone_are_enough() -> None:
    model, data = build(LLAMA, seed=0), rows_of(kind="packed")
    with engine_of(model) as engine:
        want = engine.backward(data)
        del data["position_ids"]
        assert engine.backward(data).loss == want.loss


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"weight_slots": 1}, "weight_slots"),
        ({"accumulation_steps": 0}, "accumulation_steps"),
        ({"threads": 99_999}, "threads = 99999"),
        ({"compute_dtype": "fp8"}, "fp8"),
        ({"pin": "zzz"}, "pin = 'zzz'"),
        ({"init": "bogus"}, "bogus"),
        ({"gradient_plane": False}, "cannot clip"),
        ({"device": "cuda:7"}, "CUDA"),
        ({"optim": AdamW(groups=())}, ""),
    ],
)
def test_plans_that_cannot_work_are_refused(options: dict[str, Any], what: str) -> None:
    options = {"device": "cpu", **options}
    if not what:
        host_engine(build(LLAMA, seed=0), verify="never", **options).close()
        return
    with pytest.raises(UserError, match=what):
        host_engine(build(LLAMA, seed=0), verify="never", **options)


def test_a_model_that_does_not_fit_is_refused_with_a_memory_breakdown() -> None:
    with pytest.raises(PlanRefused, match=r"AdamW states \(m \+ v\)"):
        engine_of(build(LLAMA, seed=0), host_gib=1e-4)

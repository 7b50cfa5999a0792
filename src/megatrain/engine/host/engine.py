"""`HostEngine`: a Hugging Face model trained from host memory, one call per optimizer step.

What is where: the store holds the planes (host), the ring and the edge slots hold weights in passing (device), the step runner
drives HF's code, the gradient flow brings gradients home, the optimizer updates planes in the background.

This file is the surface: what a step is made of, and what of an engine can be read, saved and loaded. assembly.py makes its
parts, flows.py holds the device side, climb.py goes on with less where the device has no room.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from megatrain.checkpoint.async_save import SaveHandle, SaveProgress
from megatrain.checkpoint.host_planes import HostCheckpoints
from megatrain.checkpoint.manager import CheckpointManager, SaveOptions
from megatrain.device.attention import attention_order, fastest_attention
from megatrain.device.streams import Streams
from megatrain.engine import batches
from megatrain.engine.base import Batch, Engine, check_learning_rate, refuse_unmatched_groups, skip_reason
from megatrain.engine.host import rng as randomness
from megatrain.engine.host.assembly import (
    dissect_source,
    fill,
    limit_device,
    make_shell,
    make_store,
)
from megatrain.engine.host.buffers import DeviceBuffers
from megatrain.engine.host.gradients import Route
from megatrain.engine.host.instruments import Debug, Instruments
from megatrain.engine.host.oom import OomRecovery
from megatrain.engine.host.optimizer import HostOptimizer, LossScale
from megatrain.engine.host.step import StepAborter
from megatrain.engine.objective import Objective
from megatrain.engine.parity_check import verify_family, verify_packing
from megatrain.engine.plan import ExecutionPlan, StepShape, device_of
from megatrain.engine.results import EvalResult, StepResult
from megatrain.errors import NumericStop, UserError
from megatrain.metrics.spans import Span
from megatrain.models.build import refuse_other_config
from megatrain.models.structure import attention_shape
from megatrain.optim.spec import OptimizerSpec
from megatrain.optim.updater import CpuUpdater

T = TypeVar("T")
INITS, VERIFY = (None, "random", "empty"), ("auto", "always", "never")


class HostEngine(Engine):
    """Trains a Hugging Face causal language model whose state lives in host memory.

    Args:
        model: A folder (or cached hub id) with config.json and safetensors, or an in-memory CausalLM, which is copied.
        plan: How steps are computed; by default every unit streams from the host and every layer is recomputed. See
            `megatrain.plan` for one that is made for a machine.
        optim: The optimizer; by default AdamW.
        objective: The loss; by default cross entropy.
        seed: Seed of initialisation, dropout and router jitter.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`.
        init: `random` initialises from the config alone, by HF's own rules, seeded. `empty` reads no weights: `load` must follow.
        verify: Parity check on a tiny copy before the start: `auto` for a model from a folder, `always`, `never`.
        trust_remote_code: Whether code in the model folder may run.
        debug: Settings for tests and measurements.

    Attributes:
        store: The host planes.
        buffers: The model's buffers by full name, on the CPU.
        source_folder: The model's folder, None for a model in memory.

    Raises:
        UserError: The model or the plan is not usable, or the family is not computed exactly.
        PlanRefused: The planes do not fit this machine's memory.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        plan: ExecutionPlan | None = None,
        *,
        optim: OptimizerSpec | None = None,
        objective: Objective | None = None,
        seed: int = 0,
        device: str | torch.device = "auto",
        init: Literal["random", "empty"] | None = None,
        verify: Literal["auto", "always", "never"] = "auto",
        trust_remote_code: bool = False,
        debug: Debug | None = None,
    ):
        super().__init__(optim, objective, seed)
        for name, value, words in (("init", init, INITS), ("verify", verify, VERIFY)):
            if value not in words:
                raise UserError(f"{name} = {value!r} is not one of {', '.join(map(str, words))}", "HostEngine")
        self.device, debug = device_of(device), debug or Debug()
        plan = (plan or ExecutionPlan()).for_device(self.device, self.optim)
        self._aborter = StepAborter()
        self._computing = threading.Lock()
        self._gradient_scale = 1.0
        self._loss_scale = LossScale() if plan.compute == torch.float16 else None
        device_bytes = limit_device(self.device, plan.device_gib)

        # From here on the engine's four parts are made, as docs/design.md lists them: the model taken apart, without weights;
        parts = dissect_source(model, plan.compute, trust_remote_code, plan.attn_implementation)
        self.source_folder, self.config, self.structure = parts.source_folder, parts.config, parts.structure
        self.buffers = parts.buffers
        if verify == "always" or (verify == "auto" and self.source_folder is not None):
            always = verify == "always"
            verify_family(self.config, parity_engine, always=always, trust_remote_code=trust_remote_code)
        refuse_unmatched_groups(self.structure, self.optim)
        # Kept here because the shell changes the config's implementation for packed rows.
        self._packing_asks = None if verify == "never" else (self.config._attn_implementation, trust_remote_code)
        plan = plan.for_model(self.structure, self.config.get_text_config().vocab_size)

        # planes and optimizer;
        self.store = make_store(self.structure, self.optim, plan, self.device)
        fill(parts, self.store, init, seed, self.device)
        self._streams = Streams(self.device, debug.disturb)
        self.instruments = Instruments(self._streams, self.store, debug.instruments)
        assert plan.threads is not None
        self._updater = CpuUpdater(plan.threads, self._streams.spans.add)
        self._optimizer = HostOptimizer(
            self.store, self.structure.units, self.structure.frozen, self.optim, self._updater
        )
        self._optimizer.compile_kernels(plan.gradient_dtype or plan.transport)

        # device buffers;
        device_buffers = {name: buffer.to(self.device) for name, buffer in self.buffers.items()}
        shell = make_shell(
            parts,
            device_buffers,
            lambda *call: self._flows.runner.run_layer(*call),
            plan,
            flex=plan.compiled and self._streams.cuda,
            trust_remote_code=trust_remote_code,
        )
        self._flows = DeviceBuffers(
            self.store, self._streams, self._optimizer, shell, self.objective, self._aborter, plan, debug.poison
        )

        # OOM recovery and checkpoints.
        self._oom = OomRecovery(self._flows, plan, self.config, device_bytes, self._rearrange, self.close)
        self._host_checkpoints = HostCheckpoints(
            self.structure,
            self.store,
            self.optim,
            self.buffers,
            device_buffers,
            self.source_folder,
            trust_remote_code,
            self.device,
            self._optimizer.pending,
        )
        self._checkpoints = CheckpointManager(self._host_checkpoints, empty=init == "empty")

    @property
    def plan(self) -> ExecutionPlan:
        """The plan in effect, resolved for the model and the device; OOM recovery may have reduced it."""
        return self._oom.plan

    # ---------------------------------------------------------------- training

    def train_step(self, batch: Batch, learning_rate: float | None = None) -> StepResult:
        """One optimizer step on all rows of `batch`. Returns when loss and norm are known; AdamW goes on in the background.

        Args:
            batch: CPU int64 tensors `input_ids`, `labels` (rows, T), -100 = no target, unshifted; optionally `position_ids`,
                `document_ids`, `attention_mask` (rows, T). Rows may be any number, at least one.
            learning_rate: Of this step; by default the optimizer's.

        Raises:
            UserError: The batch is malformed. Nothing was changed.
            NumericStop: Without a gradient plane, gradients were not finite and some units were already updated.
        """
        started = time.perf_counter()
        check_learning_rate(learning_rate)
        batch, tokens = self._checked(batch)
        self._checkpoints.check_save()
        if tokens == 0:
            self.step += 1
            return StepResult(None, None, 0, "no target tokens", {"step": time.perf_counter() - started})
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        if self._flows.route is Route.FUSED_UPDATE:
            self._optimizer.coefficients = self.optim.coefficients(self.updates + 1, learning_rate)
        loss, norm, metrics = self._forward_backward(batch, tokens, scale)
        self.step += 1
        skipped = self._decide(loss, norm)
        if skipped is None:
            self._update(norm, scale, learning_rate)
        return self._result(batch, tokens, loss, norm, metrics, skipped, started)

    def backward(self, batch: Batch) -> StepResult:
        """Gradients of a step, without an update; read them with `named_gradients`."""
        started = time.perf_counter()
        if self._flows.route is Route.FUSED_UPDATE:
            raise UserError("this engine keeps no gradients", "gradient_plane=False", "leave gradient_plane at True")
        batch, tokens = self._checked(batch)
        if tokens == 0:
            return StepResult(None, None, 0, "no target tokens")
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        loss, norm, metrics = self._forward_backward(batch, tokens, scale)
        return self._result(batch, tokens, loss, norm, metrics, "gradients only", started)

    def eval_step(self, batch: Batch) -> EvalResult:
        """Loss of a batch in evaluation mode. Changes nothing, also not what later training steps compute."""
        batch, tokens = self._checked(batch)
        if tokens == 0:
            return EvalResult(0.0, 0)
        with self.instruments.paused():
            loss_sum, metric_sums, _ = self._until_it_fits(
                batch, lambda shape: self._flows.runner.loss(batch, shape).wait(), training=False
            )
        return EvalResult(loss_sum, tokens, metric_sums)

    def begin_trace(self) -> None:
        """Record visits of layers, too, until `end_trace`."""
        self.instruments.begin_trace()

    def end_trace(self) -> list[Span]:
        """Everything recorded since `begin_trace`; waits for the updates of the latest step."""
        self._optimizer.wait_all()
        self._streams.synchronize()
        return self.instruments.end_trace()

    def interrupt(self, error: BaseException) -> bool:
        """From another thread: let the step in progress, or the next one, end with `error`; the state stays as before that step.

        Returns:
            False, and nothing happens, where a step cannot be dropped (without a gradient plane).
        """
        if self._flows.route is Route.FUSED_UPDATE:
            return False
        self._aborter.error = error
        return True

    def _forward_backward(self, batch: Batch, tokens: int, loss_scale: float) -> tuple[float, float, dict[str, float]]:
        """(loss, gradient norm, metrics) of the step, waited for. The gradients are on the host or on their way."""

        self._gradient_scale = loss_scale

        def compute(shape: StepShape) -> tuple[float, float, dict[str, float]]:
            self._flows.reset_counters()
            with self.instruments.step(self.step + 1):
                with randomness.seeded(self.device, self.seed, self.step):
                    sums, on_device = self._flows.runner.gradients(batch, shape, loss_scale)
                loss, metrics, [squares] = sums.wait(on_device)  # the step's only synchronisation
                if self._flows.route is not Route.COPY:
                    with self._streams.host_waits("slabs"):
                        self._flows.gradients.settle()
                        if self._flows.route is Route.ACCUMULATE:
                            squares = self._optimizer.squared_norm()
            return loss, squares, metrics

        loss_sum, squares, metrics = self._until_it_fits(batch, compute, training=True)
        norm = math.sqrt(squares) / loss_scale if squares >= 0 else math.nan
        return loss_sum / tokens, norm, {name: value / tokens for name, value in metrics.items()}

    def _until_it_fits(self, batch: Batch, compute: Callable[[StepShape], T], training: bool) -> T:
        """Run `compute` as far as the device has room; see `OomRecovery.until_it_fits`."""

        def attempt(shape: StepShape) -> T:
            with fastest_attention(self._attention_order(batch)):
                return compute(shape)

        if not self._computing.acquire(blocking=False):
            raise UserError(
                "another thread is computing on this engine", "HostEngine", "call it from one thread at a time"
            )
        try:
            return self._oom.until_it_fits(batch["input_ids"].shape, attempt, training)
        finally:
            self._computing.release()

    def _decide(self, loss: float, norm: float) -> str | None:
        """The finite guard: a reason to skip the update, or None. Skipping leaves every byte of the state as it was."""
        why = skip_reason(loss, norm)
        if self._loss_scale:
            self._loss_scale = self._loss_scale.after(why is None)
        if why is not None and self._flows.route is Route.FUSED_UPDATE:
            self.close()
            raise NumericStop(
                f"step {self.step}: loss {loss}, gradient norm {norm}; without a gradient plane some units were already updated\n"
                "  -> resume from the last checkpoint; gradient_plane=True skips such steps instead"
            )
        return why

    def _update(self, norm: float, loss_scale: float, learning_rate: float | None) -> None:
        """Launch AdamW for every unit and forget the weights on the device."""
        self.updates += 1
        if self._flows.route is not Route.FUSED_UPDATE:
            clip = self.optim.max_grad_norm
            coefficient = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
            coefficients = self.optim.coefficients(self.updates, learning_rate, coefficient / loss_scale)
            with self._streams.traced("update of resident units") if self.store.resident_bytes else nullcontext():
                self._optimizer.launch(coefficients, self._flows.gradients.arrived)
        self._flows.weights.drop_all()

    # ---------------------------------------------------------------- state

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, exact fp32 master on the CPU) of every parameter, tied ones once. Waits for updates."""
        self._refuse_closed()
        for unit in self.structure.units:
            self._optimizer.wait(unit.name)
            for local, name in unit.full_names():
                yield name, self.store.units[unit.name].read_master(local)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, fp32 gradient on the CPU) of the latest step, before clipping, without the loss scale."""
        self._refuse_closed()
        self._streams.synchronize()
        self._flows.gradients.settle()
        for unit in self.structure.units:
            grad = self.store.units[unit.name].grad
            if grad is None:
                raise UserError(
                    f"the gradient of {unit.name} is gone: AdamW has used it",
                    "named_gradients",
                    "call backward() instead of train_step() to look at gradients of units on the device",
                )
            for local, name in unit.full_names():
                yield name, unit.layout.view(grad, local).float() / self._gradient_scale

    def save(
        self,
        folder: str | Path,
        extra: dict[str, Any] | None = None,
        *,
        background: bool = False,
        weights_only: bool = False,
        on_error: Literal["stop", "warn"] = "stop",
        buffer_bytes: int | None = None,
        then: Callable[[SaveProgress], object] = lambda progress: None,
    ) -> SaveHandle:
        """Write a checkpoint that `from_pretrained` loads and from which `load` goes on bit for bit.

        Args:
            folder: A folder that does not exist yet.
            extra: JSON data to keep with it, returned by `load`.
            background: Return at once and write the state of this moment while training continues, see
                [Note: a unit while a save runs] in checkpoint/host_planes.py. A second save waits for the first.
            weights_only: bf16 weights without training state, 2 bytes a parameter.
            on_error: What the next step does if a save in the background has failed: raise its error, or log a warning.
            buffer_bytes: Most memory for copies of units whose update comes before their turn. By default as much as all of them
                need, within half of the host memory that is free at this moment, and never less than two large units. Copies
                leave the host its last GiB in any case.
            then: Called, in the writer's thread, when the checkpoint is whole and was read back, with how it went.

        Returns:
            The save: `done()`, `progress()`, `result()`.

        Raises:
            UserError: The folder exists, the disk has no room, or (unless `background`) the system refuses a write.
        """
        self._refuse_closed()
        if not background:
            self._optimizer.wait_all()
        if self.store.resident_bytes:
            self._streams.synchronize()  # the writer copies them on a stream of its own
        state = {
            "step": self.step,
            "updates": self.updates,
            "seed": self.seed,
            "loss_scale": self._loss_scale.state_dict() if self._loss_scale else None,
            "ladder": self._oom.as_dict(),
            "extra": extra or {},
        }
        options = SaveOptions(background, weights_only, on_error, buffer_bytes, then)
        save = self._checkpoints.save(Path(folder), state, options)
        self._optimizer.saving = self._host_checkpoints.source
        return save

    def prepare_save(self, buffer_bytes: int | None = None) -> None:
        """Make host memory ready for the copies of a save in the background that is some seconds away. Returns at once.

        Such a save holds the next step up less then. Without a save to come, the memory is kept until `close`.

        Args:
            buffer_bytes: As `save` will get it.
        """
        self._refuse_closed()
        self._checkpoints.prepare_save(buffer_bytes)

    def wait_saved(self) -> None:
        """Wait until no save is in progress. Raises, or warns of, an error that nobody has been told of."""
        self._refuse_closed()
        self._checkpoints.wait_saved()

    def cancel_save(self) -> None:
        """Give up the save in progress, if there is one. Nothing of it is left; older checkpoints are as they were."""
        self._checkpoints.cancel_save()

    def load(self, folder: str | Path, *, wait: bool = True) -> dict[str, Any]:
        """Restore weights, moments, step and scaler from a checkpoint.

        Args:
            folder: A complete checkpoint of this model.
            wait: False returns when the units on the device are there; the others stream in while the first forward runs,
                see [Note: lazy reading] in checkpoint/reader.py. A damaged tensor is then found by the step that needs it.

        Returns:
            The `extra` it was saved with.

        Raises:
            UserError: The checkpoint is damaged, or another model's. If it was found before anything was restored, the engine
                is as it was; otherwise the engine refuses to compute until a load succeeds.
        """
        super()._refuse_closed()  # a failed load is no obstacle
        refuse_other_config(Path(folder), self.config)
        self._checkpoints.wait_saved()
        self._optimizer.forget(self._checkpoints.cancel_load())
        self._optimizer.wait_all()
        self._streams.synchronize()
        loading, state = self._host_checkpoints.start_load(Path(folder))
        self._checkpoints.follow_load(loading)
        self._optimizer.expect(loading.futures)
        self._flows.weights.drop_all()
        self.step, self.updates, self.seed = state["step"], state["updates"], state["seed"]
        if self._loss_scale and state.get("loss_scale"):
            self._loss_scale = LossScale.from_state_dict(state["loss_scale"])
        loading.wait(None if wait else [name for name, planes in self.store.units.items() if planes.resident])
        self._streams.synchronize()
        self._oom.restore(state.get("ladder") or {})
        return state["extra"]

    def counters(self) -> dict[str, int | float | str]:
        """Of the latest step: `h2d_bytes`, `d2h_bytes` copied; `weight_bytes` loaded, `gradient_bytes` sent; `update_wait_s`,
        `slab_wait_s`, `slab_waits`. And `slabs`, `weight_slots` that exist, and the gradients' `route`."""
        return self._flows.counters()

    def memory(self) -> dict[str, int]:
        """Bytes: `host_<plane>`, `host_slabs`, `host_pinned`, `device_resident`, `device_slots`, `device_gradients`,
        `device_peak`."""
        return self._flows.memory()

    def close(self) -> None:
        """Wait for background work, then give all memory back. A closed engine refuses every further call."""
        if self._closed:
            return
        self._closed = True
        self._checkpoints.close()
        self._streams.synchronize()
        self._optimizer.close()
        self._flows.close()
        self.store.close()

    # ---------------------------------------------------------------- small parts

    def _checked(self, batch: Batch) -> tuple[dict[str, torch.Tensor], int]:
        checked, tokens = super()._checked(batch)
        if self._packing_asks is not None and batches.is_packed(checked):
            attention, trust_remote_code = self._packing_asks
            verify_packing(self.config, attn_implementation=attention, trust_remote_code=trust_remote_code)
            self._packing_asks = None
        return checked, tokens

    def _attention_order(self, batch: Batch) -> tuple[SDPBackend, ...]:
        """For rows of this length."""
        shape, tokens = attention_shape(self.config.get_text_config()), batch["input_ids"].shape[1]
        return attention_order(shape, tokens, self.plan.compute, self.device)

    def _result(
        self,
        batch: Batch,
        tokens: int,
        loss: float,
        norm: float,
        metrics: dict[str, float],
        skipped: str | None,
        started: float,
    ) -> StepResult:
        """Of the step that has just been computed on `batch`."""
        seconds, moved = self._flows.seconds(), self._flows.moved_bytes()
        seconds["step"] = time.perf_counter() - started
        shape = self._oom.shape(batch["input_ids"].shape)
        pipeline = self.instruments.record(self._flows, shape, self._oom.changes)
        return StepResult(loss, norm, tokens, skipped, seconds, self._gradient_scale, moved, pipeline, metrics)

    def _rearrange(self, plan: ExecutionPlan) -> None:
        """Remake the device buffers for another plan; see `DeviceBuffers.rearrange`. No step is in progress."""
        self.wait_saved()  # a writer reads the planes where they lie
        self._optimizer.wait_all()
        self._streams.synchronize()
        try:
            self._flows.rearrange(plan)
        except BaseException:  # without its buffers the engine is none
            self._closed = True
            self._optimizer.close()
            self.store.close()
            raise

    def _refuse_closed(self) -> None:
        """Raise, too, where the planes hold no consistent state."""
        super()._refuse_closed()
        self._checkpoints.refuse_mixture()


def parity_engine(model: nn.Module) -> HostEngine:
    """The engine that a parity check compares with plain Hugging Face: fp32 on the CPU, rows cut into microbatches."""
    return HostEngine(
        model, ExecutionPlan(compute_dtype="fp32", microbatch_rows=2, threads=1), device="cpu", verify="never"
    )

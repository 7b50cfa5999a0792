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
from collections.abc import Callable, Collection, Iterator, Sequence
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
from megatrain.engine.base import Engine, check_learning_rate, skip_reason
from megatrain.engine.host import rng as randomness
from megatrain.engine.host.assembly import dissect_source, fill, make_shell, make_store
from megatrain.engine.host.buffers import BufferSettings, DeviceBuffers
from megatrain.engine.host.gradients import Route
from megatrain.engine.host.instruments import Instruments
from megatrain.engine.host.ladder import Cut
from megatrain.engine.host.oom import OomRecovery
from megatrain.engine.host.optimizer import HostOptimizer
from megatrain.engine.host.settings import (
    ComputeDtype,
    Placement,
    check_placement,
    check_settings,
    check_words,
    compute_dtype_of,
    default_threads,
    device_of,
    head_chunk_tokens_of,
    limit_device,
    transport_dtype_of,
)
from megatrain.engine.host.step import Batch, StepAborter
from megatrain.engine.parity_check import verify_packing
from megatrain.engine.plan import StepShape
from megatrain.engine.results import EvalResult, StepResult
from megatrain.errors import NumericStop, UserError
from megatrain.metrics.spans import Span
from megatrain.models.build import refuse_other_config
from megatrain.models.structure import attention_shape
from megatrain.optim.scaler import LossScale
from megatrain.optim.spec import OptimizerSpec
from megatrain.optim.updater import CpuUpdater

T = TypeVar("T")


class HostEngine(Engine):
    """Trains a Hugging Face causal language model whose state lives in host memory.

    Args:
        model: A folder (or cached hub id) with config.json and safetensors, or an in-memory CausalLM, which is copied.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`.
        optim: The optimizer; by default AdamW.
        compute_dtype: What layers compute in; `auto` is bf16 on a GPU and fp32 on a CPU. fp16 scales the loss dynamically.
        grad_transport: Type in which gradients travel to the host; `auto` is fp32 with fp32 compute, else bf16.
        pin: `all` pins hi and gradient planes, `staged` copies through small pinned buffers, `auto` tries the first and
            falls back to the second with a warning.
        resident: Units whose planes live on the device and are updated there: names (`embedding`, `layer.0`, `head`), or `all`.
        kept: Layers (by index) whose activations are kept for the backward instead of computed again, or `all`.
        selective: Layers whose activations are kept in part: a compiled layer keeps the share `budget` (0..1), and the compiler
            decides what is cheap to compute again. With 0.5 all matrix products and the attention are kept.
        keep_attention: Layers that keep what their fused attention gave, and compute all else again, or `all`.
        keep_mlp: Layers that keep the products of their MLP's matrices, and compute all else again, or `all`.
        mlp_chunk_tokens: Compute MLPs (and the norm behind the layers) in chunks of so many tokens, where they compute each
            token by itself; see [Note: chunks of tokens]. Layers in `kept`, `selective` and `keep_mlp` compute theirs whole.
        offloaded: Recomputed layers whose input waits in pinned host memory, or `all`.
        compile: `auto` compiles the layers on a GPU (a family that cannot be compiled runs eager, with a warning), `off` never,
            `on` everywhere.
        weight_slots: Device buffers that layers stream through (>= 2). As many as layers: they stay for the whole step.
        gradient_slabs: Pinned gradient buffers, where gradients do not go straight into a gradient plane.
        gradient_plane: False lets AdamW eat gradients as they arrive: 2 bytes a parameter less, but no clipping, no
            accumulation windows, and a step that is not finite stops the run instead of being skipped.
        segment: K keeps the input of every K-th layer only and computes layers a third time. None keeps every input.
        microbatch_rows: Rows that a layer computes together; by default as many as hold 16,384 tokens.
        windows: Accumulation windows of a step.
        head_chunk_tokens: Tokens whose logits exist at the same time; by default as many as fit 4 GiB.
        threads: AdamW threads; by default the cores this process may use, less one.
        host_gib: Host memory that may be used, by default what the system says is available.
        device_gib: Device memory that this process may use, enforced; by default all of it.
        init: `random` initialises from the config alone, by HF's own rules, seeded. `empty` reads no weights: `load` must follow.
        seed: Of initialisation, dropout and router jitter.
        trust_remote_code: Whether code in the model folder may run.
        attn_implementation: HF's name of an attention implementation; by default sdpa where the family has it.
        instruments: Whether copies, waits and updates are timed; see `StepResult.pipeline`.
        verify: `auto` verifies families outside the tested list on a tiny copy before the start, `always`, `never`.
        disturb, poison: For tests: delay streams at random, fill buffers with NaN after their use.

    Raises:
        UserError: The model or a setting is not usable, or the family is not computed exactly.
        PlanRefused: The planes do not fit this machine's memory.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        device: str | torch.device = "auto",
        optim: OptimizerSpec | None = None,
        compute_dtype: ComputeDtype = "auto",
        grad_transport: Literal["auto", "bf16", "fp32"] = "auto",
        pin: Literal["auto", "all", "staged"] = "auto",
        resident: Collection[str] | Literal["all"] = (),
        kept: Collection[int] | Literal["all"] = (),
        selective: Collection[int] | Literal["all"] = (),
        budget: float = 0.5,
        keep_attention: Collection[int] | Literal["all"] = (),
        keep_mlp: Collection[int] | Literal["all"] = (),
        mlp_chunk_tokens: int | None = None,
        offloaded: Collection[int] | Literal["all"] = (),
        compile: Literal["auto", "on", "off"] = "auto",
        weight_slots: int = 2,
        gradient_slabs: int = 12,
        gradient_plane: bool = True,
        segment: int | None = None,
        microbatch_rows: int | None = None,
        accumulation_steps: int = 1,
        head_chunk_tokens: int | None = None,
        threads: int | None = None,
        host_gib: float | None = None,
        device_gib: float | None = None,
        init: Literal["random", "empty"] | None = None,
        seed: int = 0,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        instruments: bool = True,
        verify: Literal["auto", "always", "never"] = "auto",
        disturb: Callable[[str, Streams], None] | None = None,
        poison: bool = False,
    ):
        super().__init__(optim, seed)
        self.device = device_of(device)
        compute = compute_dtype_of(compute_dtype, self.device)
        transport = transport_dtype_of(grad_transport, compute)
        check_words(pin=pin, init=init, verify=verify, compile=compile)
        check_settings(
            self.optim,
            compute,
            gradient_plane,
            {
                "weight_slots": (weight_slots, 2),
                "gradient_slabs": (gradient_slabs, 1),
                "accumulation_steps": (accumulation_steps, 1),
                "segment": (segment, 1),
                "microbatch_rows": (microbatch_rows, 1),
                "head_chunk_tokens": (head_chunk_tokens, 1),
                "mlp_chunk_tokens": (mlp_chunk_tokens, 1),
            },
            threads,
        )
        self._interrupt = StepAborter()
        self._computing = threading.Lock()
        self._gradient_scale = 1.0
        self._loss_scale = LossScale() if compute == torch.float16 else None
        device_bytes = limit_device(self.device, device_gib)

        # From here on the engine's four parts are made, as docs/design.md lists them: the model taken apart, without weights;
        parts = dissect_source(model, compute, self.optim, verify, trust_remote_code, attn_implementation)
        self.source_folder, self.config, self.structure = parts.source_folder, parts.config, parts.structure
        self.buffers = parts.buffers
        # Kept here because the shell changes the config's implementation for packed rows.
        self._packing_asks = None if verify == "never" else (self.config._attn_implementation, trust_remote_code)
        placement = Placement.of(self.structure, resident, kept, selective, offloaded, keep_attention, keep_mlp)
        check_placement(self.structure, placement, segment or 1, compute, gradient_plane)

        # planes and optimizer;
        grad_dtype = None if not gradient_plane else torch.float32 if accumulation_steps > 1 else transport
        self.store = make_store(
            self.structure, self.optim, placement.resident, compute, grad_dtype, self.device, host_gib
        )
        fill(parts, self.store, init, seed, self.device)
        self._streams = Streams(self.device, disturb)
        self.instruments = Instruments(self._streams, self.store, instruments)
        self._updater = CpuUpdater(threads or default_threads(), self._streams.spans.add)
        self._optimizer = HostOptimizer(
            self.store, self.structure.units, self.structure.frozen, self.optim, self._updater
        )
        self._optimizer.compile_kernels(grad_dtype or transport)

        # flows;
        compiled = compile == "on" or (compile == "auto" and self._streams.cuda)
        device_buffers = {name: buffer.to(self.device) for name, buffer in self.buffers.items()}
        shell = make_shell(
            parts,
            device_buffers,
            lambda *call: self._flows.runner.run_layer(*call),
            flex=compiled and self._streams.cuda,
            compiled=compiled,
            budget=budget,
            mlp_chunk_tokens=mlp_chunk_tokens,
            keeps_mlps=bool(placement.mlp),
            trust_remote_code=trust_remote_code,
            attention=attn_implementation,
        )
        chosen = BufferSettings(compute, compiled, pin, weight_slots, gradient_plane, gradient_slabs, transport, poison)
        self._flows = DeviceBuffers(
            self.store,
            self._streams,
            self._optimizer,
            shell,
            self._interrupt,
            chosen,
            accumulation_steps,
            placement.offloaded,
        )

        # climb and checkpoints.
        head_tokens = head_chunk_tokens or head_chunk_tokens_of(self.config.get_text_config().vocab_size, compiled)
        cut = Cut(microbatch_rows, head_tokens, segment or 1, placement)
        self._climb = OomRecovery(self._flows, cut, self.config, device_bytes, self._rearrange, self.close)
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
        loss, norm = self._forward_backward(batch, tokens, scale)
        self.step += 1
        skipped = self._decide(loss, norm)
        if skipped is None:
            self._update(norm, scale, learning_rate)
        return self._result(batch, tokens, loss, norm, skipped, started)

    def backward(self, batch: Batch) -> StepResult:
        """Gradients of a step, without an update; read them with `named_gradients`."""
        started = time.perf_counter()
        if self._flows.route is Route.FUSED_UPDATE:
            raise UserError("this engine keeps no gradients", "gradient_plane=False", "leave gradient_plane at True")
        batch, tokens = self._checked(batch)
        if tokens == 0:
            return StepResult(None, None, 0, "no target tokens")
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        loss, norm = self._forward_backward(batch, tokens, scale)
        return self._result(batch, tokens, loss, norm, "gradients only", started)

    def eval_step(self, batch: Batch) -> EvalResult:
        """Loss of a batch in evaluation mode. Changes nothing, also not what later training steps compute."""
        batch, tokens = self._checked(batch)
        if tokens == 0:
            return EvalResult(0.0, 0)
        with self.instruments.paused():
            loss_sum = self._until_it_fits(
                batch, lambda shape: self._flows.runner.loss(batch, shape).item(), training=False
            )
        return EvalResult(loss_sum, tokens)

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
        self._interrupt.error = error
        return True

    def _forward_backward(self, batch: Batch, tokens: int, loss_scale: float) -> tuple[float, float]:
        """Loss and gradient norm of the step, both waited for. The gradients are home or on their way."""

        self._gradient_scale = loss_scale

        def compute(shape: StepShape) -> list[float]:
            self._flows.reset_counters()
            with self.instruments.step(self.step + 1):
                with randomness.seeded(self.device, self.seed, self.step):
                    loss_sum, squares = self._flows.runner.gradients(batch, shape, loss_scale)
                values = torch.stack([loss_sum, squares.double()]).tolist()  # the step's only synchronisation
                if self._flows.route is not Route.COPY:
                    with self._streams.host_waits("slabs"):
                        self._flows.gradients.settle()
                        if self._flows.route is Route.ACCUMULATE:
                            values[1] = self._optimizer.squared_norm()
            return values

        loss_sum, squares = self._until_it_fits(batch, compute, training=True)
        return loss_sum / tokens, math.sqrt(squares) / loss_scale if squares >= 0 else math.nan

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
            return self._climb.until_it_fits(batch["input_ids"].shape, attempt, training)
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
            "ladder": self._climb.as_dict(),
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
        self._climb.restore(state.get("ladder") or {})
        return state["extra"]

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
        return attention_order(shape, tokens, self._flows.settings.compute, self.device)

    def _result(
        self, batch: Batch, tokens: int, loss: float, norm: float, skipped: str | None, started: float
    ) -> StepResult:
        """Of the step that has just been computed on `batch`."""
        seconds, moved = self._flows.seconds(), self._flows.moved_bytes()
        seconds["step"] = time.perf_counter() - started
        shape = self._climb.shape(batch["input_ids"].shape)
        pipeline = self.instruments.record(self._flows, shape, self._climb.denser.changes)
        return StepResult(loss, norm, tokens, skipped, seconds, self._gradient_scale, moved, pipeline)

    def _rearrange(self, accumulation_steps: int, leaving: Sequence[str]) -> None:
        """Other buffers around the same state; see `DeviceBuffers.rearrange`. No step is in progress."""
        self.wait_saved()  # a writer reads the planes where they lie
        self._optimizer.wait_all()
        self._streams.synchronize()
        try:
            self._flows.rearrange(accumulation_steps, leaving)
        except BaseException:  # without its buffers the engine is none
            self._closed = True
            self._optimizer.close()
            self.store.close()
            raise

    def _refuse_closed(self) -> None:
        """Raise, too, where the planes hold no consistent state."""
        super()._refuse_closed()
        self._checkpoints.refuse_mixture()

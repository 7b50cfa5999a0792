"""`HostEngine`: a Hugging Face model trained from host memory, one call per optimizer step.

What is where: the store holds the planes (host), the ring and the edge slots hold weights in passing (device), the step runner
drives HF's code, the gradient flow brings gradients home, the optimizer updates planes in the background.
"""

from __future__ import annotations

import logging
import math
import os
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from megatrain.checkpoint.background import RunningSave
from megatrain.checkpoint.desk import CheckpointDesk
from megatrain.device.attention import fastest_attention, measured_backends
from megatrain.device.copier import StagedCopier
from megatrain.device.offload import InputStore
from megatrain.device.slabs import Slab, SlabPool
from megatrain.device.streams import Streams
from megatrain.errors import EngineClosed, NumericStop, PlanRefused, UserError
from megatrain.executor import batches, randomness
from megatrain.executor.assembly import build_model, make_copier, make_slabs, make_weight_stream, pin_planes
from megatrain.executor.gate import token_wise, verify_family, verify_packing
from megatrain.executor.gradients import GradientFlow, Route
from megatrain.executor.instruments import Instruments
from megatrain.executor.ladder import Denser, Failure, Situation
from megatrain.executor.optimizer import HostOptimizer
from megatrain.executor.results import EvalResult, StepResult
from megatrain.executor.settings import (
    ComputeDtype,
    Placement,
    check_choice,
    check_placement,
    check_settings,
    compute_dtype_of,
    device_of,
    head_chunk_tokens_of,
    refuse_if_too_large,
    transport_dtype_of,
)
from megatrain.executor.step import Batch, Interrupt, StepRunner, StepShape
from megatrain.executor.weights import UpdateGate
from megatrain.host.available import available_host_bytes
from megatrain.host.store import HostStore
from megatrain.metrics.pipeline import PipelineRecord
from megatrain.metrics.spans import Span
from megatrain.models.build import find_model_folder, fp32_parameter_names, refuse_other_config
from megatrain.models.init import initialize
from megatrain.models.memory import copy_from_memory
from megatrain.models.shell import Shell
from megatrain.models.structure import attention_shape, persistent_buffers, take_apart
from megatrain.models.weights import load_weights
from megatrain.optim.adamw import AdamW, StepCoefficients, unmatched_groups
from megatrain.optim.scaler import LossScale
from megatrain.optim.updater import CpuUpdater

logger = logging.getLogger(__name__)

T = TypeVar("T")
DEFAULT_CHUNK_TOKENS = 16384
LADDER_RESERVE_BYTES = 1 << 30
"""Host memory that must be left beside what a rung of the ladder puts there."""


class HostEngine:
    """Trains a Hugging Face causal language model whose state lives in host memory.

    Args:
        model: A folder (or cached hub id) with config.json and safetensors, or an in-memory CausalLM, which is copied.
        device: `auto` (a GPU if there is one), `cpu`, `cuda`, `cuda:1`.
        optim: AdamW's hyper-parameters.
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
        chunk_rows: Rows that a layer computes together; by default as many as hold 16,384 tokens.
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
        optim: AdamW | None = None,
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
        chunk_rows: int | None = None,
        windows: int = 1,
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
        self.optim = optim or AdamW()
        self.device = device_of(device)
        self.seed = seed
        self.step = 0
        """Calls of `train_step`, skipped ones included."""
        self.updates = 0
        """Updates applied to the moments: AdamW's step."""
        self._closed = False
        self._desk: CheckpointDesk | None = None
        self._denser = Denser()
        self._failure: Failure | None = None
        self._interrupt = Interrupt()
        self._computing = threading.Lock()
        self._segment, self._chunk_rows, self._windows = segment or 1, chunk_rows, windows
        self._head_chunk_tokens, self._device_gib = head_chunk_tokens, device_gib
        self._compute = compute_dtype_of(compute_dtype, self.device)
        self._loss_scale = LossScale() if self._compute == torch.float16 else None
        transport = transport_dtype_of(grad_transport, self._compute)
        check_choice("pin", pin, ("auto", "all", "staged"))
        check_choice("init", init, (None, "random", "empty"))
        check_choice("verify", verify, ("auto", "always", "never"))
        check_choice("compile", compile, ("auto", "on", "off"))
        check_settings(
            self.optim,
            self._compute,
            gradient_plane,
            {
                "weight_slots": (weight_slots, 2),
                "gradient_slabs": (gradient_slabs, 1),
                "windows": (windows, 1),
                "segment": (segment, 1),
                "chunk_rows": (chunk_rows, 1),
                "head_chunk_tokens": (head_chunk_tokens, 1),
                "mlp_chunk_tokens": (mlp_chunk_tokens, 1),
            },
            threads,
        )
        if device_gib is not None and self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, device_gib * 2**30 / total), self.device)

        self.source_folder: Path | None = None if isinstance(model, nn.Module) else find_model_folder(model)
        meta = build_model(model, self._compute, trust_remote_code, attn_implementation)
        self.config = meta.config
        # Kept here because the shell changes the config's implementation for packed rows.
        self._packing_asks = None if verify == "never" else (meta.config._attn_implementation, trust_remote_code)
        self.structure = take_apart(meta)
        if verify == "always" or (verify == "auto" and not isinstance(model, nn.Module)):
            verify_family(self.config, always=verify == "always", trust_remote_code=trust_remote_code)
        for group in unmatched_groups((n for u in self.structure.units for _, n in u.full_names()), self.optim):
            raise UserError(f"no parameter matches the pattern {group.pattern!r}", "optim.groups")

        split = self._compute == torch.bfloat16
        grad_dtype = None if not gradient_plane else torch.float32 if windows > 1 else transport
        self._placement = Placement.of(self.structure, resident, kept, selective, offloaded, keep_attention, keep_mlp)
        check_placement(self.structure, self._placement, self._segment, self._compute, gradient_plane)
        refuse_if_too_large(self.structure, self._placement.resident, split, grad_dtype, host_gib)
        self.store = HostStore(
            [(unit.name, unit.layout) for unit in self.structure.units],
            split=split,
            grad_dtype=grad_dtype,
            resident=self._placement.resident,
            device=self.device,
        )
        self.buffers = dict(meta.named_buffers())
        self._fill(model, init, persistent_buffers(meta))
        self._streams = Streams(self.device, disturb)
        self._slabs: SlabPool | None = None
        self._edge_slabs: dict[str, Slab] = {}
        self.instruments = Instruments(self._streams, self.store, instruments)
        # One core stays with the thread that drives the device.
        threads = threads or max(1, len(os.sched_getaffinity(0)) - 1)
        self._updater = CpuUpdater(threads, self._streams.spans.add)
        self._flows = _FlowSettings(pin, weight_slots, gradient_plane, gradient_slabs, transport, poison)
        self._make_flows()
        self._compiled = compile == "on" or (compile == "auto" and self._streams.cuda)
        device_buffers = {name: buffer.to(self.device) for name, buffer in self.buffers.items()}
        # What is token-wise also tells which matrices are the MLP's.
        self._places = (
            token_wise(self.config, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code)
            if mlp_chunk_tokens is not None or self._placement.mlp
            else {}
        )
        self._make_runner(
            frozenset(fp32_parameter_names(meta, self._compute)), device_buffers, budget, mlp_chunk_tokens
        )
        self._desk = CheckpointDesk(
            self.structure,
            self.store,
            self.buffers,
            device_buffers,
            self.source_folder,
            trust_remote_code,
            self.device,
            empty=init == "empty",
        )

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
        if learning_rate is not None and not (isinstance(learning_rate, int | float) and 0 <= learning_rate < math.inf):
            raise UserError(f"learning_rate = {learning_rate!r} is not a number of at least 0", "train_step")
        batch, tokens = self._checked(batch)
        self._forget_ended_save()
        if tokens == 0:
            self.step += 1
            return StepResult(None, None, 0, "no target tokens", {"step": time.perf_counter() - started})
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        if self._route is Route.EATEN:
            self._optimizer.coefficients = StepCoefficients.of(self.optim, self.updates + 1, learning_rate)
        loss, norm = self._forward_backward(batch, tokens, scale)
        self.step += 1
        skipped = self._decide(loss, norm)
        if skipped is None:
            self._update(norm, scale, learning_rate)
        seconds, moved = self._seconds(started), self._moved_bytes()
        return StepResult(loss, norm, tokens, skipped, seconds, scale, moved, self._pipeline(batch))

    def backward(self, batch: Batch) -> StepResult:
        """Gradients of a step, without an update; read them with `named_gradients`."""
        started = time.perf_counter()
        if self._route is Route.EATEN:
            raise UserError("this engine keeps no gradients", "gradient_plane=False", "leave gradient_plane at True")
        batch, tokens = self._checked(batch)
        if tokens == 0:
            return StepResult(None, None, 0, "no target tokens")
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        loss, norm = self._forward_backward(batch, tokens, scale)
        seconds, moved = self._seconds(started), self._moved_bytes()
        return StepResult(loss, norm, tokens, "gradients only", seconds, scale, moved, self._pipeline(batch))

    def eval_step(self, batch: Batch) -> EvalResult:
        """Loss of a batch in evaluation mode. Changes nothing, also not what later training steps compute."""
        batch, tokens = self._checked(batch)
        if tokens == 0:
            return EvalResult(0.0, 0)
        with self.instruments.paused():
            loss_sum = self._until_it_fits(batch, lambda shape: self._runner.loss(batch, shape).item(), training=False)
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
        if self._route is Route.EATEN:
            return False
        self._interrupt.error = error
        return True

    def _forward_backward(self, batch: Batch, tokens: int, loss_scale: float) -> tuple[float, float]:
        """Loss and gradient norm of the step, both waited for. The gradients are home or on their way."""

        self._gradient_scale = loss_scale

        def compute(shape: StepShape) -> list[float]:
            self._reset_counters()
            with self.instruments.step(self.step + 1):
                with randomness.seeded(self.device, self.seed, self.step):
                    loss_sum, squares = self._runner.gradients(batch, shape, loss_scale)
                values = torch.stack([loss_sum, squares.double()]).tolist()  # the step's only synchronisation
                if self._route is not Route.DIRECT:
                    with self._streams.host_waits("slabs"):
                        self._gradients.settle()
                        if self._route is Route.ADDED:
                            values[1] = self._optimizer.squared_norm()
            return values

        loss_sum, squares = self._until_it_fits(batch, compute, training=True)
        return loss_sum / tokens, math.sqrt(squares) / loss_scale if squares >= 0 else math.nan

    def _until_it_fits(self, batch: Batch, compute: Callable[[StepShape], T], training: bool) -> T:
        """Run `compute`; on CUDA out of memory drop what it has built and try the next denser setting, for good."""
        if not self._computing.acquire(blocking=False):
            raise UserError(
                "another thread is computing on this engine", "HostEngine", "call it from one thread at a time"
            )
        try:
            return self._climb_until_it_fits(batch, compute, training)
        finally:
            self._computing.release()

    def _climb_until_it_fits(self, batch: Batch, compute: Callable[[StepShape], T], training: bool) -> T:
        while True:
            shape = self._shape(batch)
            try:
                with _Abandon(self), fastest_attention(self._attention_order(batch)):
                    return compute(shape)
            except torch.OutOfMemoryError:
                if self._closed or self._failure is None:
                    raise
                failure, self._failure = self._failure, None
            # Out here, where no traceback keeps the step's tensors alive any more.
            self._climb(shape, batch["input_ids"].shape, failure, training)

    def _climb(self, shape: StepShape, batch_BT: Sequence[int], failure: Failure, training: bool) -> None:
        """Go on with the next rung of the ladder, or refuse with the ledger where there is none."""
        resident = [name for name, planes in self.store.units.items() if planes.resident]
        more_windows = training and self._room_for_windows()
        offload = training and self._room_for_inputs(batch_BT, shape.windows)
        denser = self._denser.next(shape, Situation(batch_BT[0], training, offload, more_windows, len(resident)))
        if denser is None:
            raise PlanRefused(
                f"{failure}\n  this is the densest setting\n  -> use shorter rows, or a device with more memory"
            )
        before = self._denser
        if denser.resident != self._denser.resident:
            denser = replace(denser, device_fraction=self._fraction_without(resident[denser.resident :]))
        self._adopt(denser)
        if self._streams.cuda:
            torch.cuda.empty_cache()
        logger.warning(
            "%s\n  the step is dropped, nothing was updated; it is computed again with %s\n"
            "  this run goes on so; for the next one put into its config:\n%s",
            failure,
            denser.step_from(before),
            textwrap.indent(denser.yaml, "    "),
        )

    def _adopt(self, denser: Denser) -> None:
        """Go on with what the ladder says; no step is in progress."""
        if denser.offload:
            self._inputs.layers = frozenset(range(len(self.structure.layers)))
        windows = max(self._windows, denser.windows or 1)
        resident = [name for name, planes in self.store.units.items() if planes.resident]
        leaving = resident[denser.resident :] if denser.resident is not None else []
        self._denser = denser
        if windows != self._windows or leaving:
            self._rearrange(windows, leaving)

    def _fraction_without(self, leaving: Sequence[str]) -> float:
        """`memory.device_fraction` with which a plan has room for all but these units. Two digits, rounded down."""
        freed = sum(plane.nbytes for name in leaving for plane in self.store.units[name].state().values())
        peak = torch.cuda.max_memory_allocated(self.device) if self._streams.cuda else freed
        return math.floor(100 * max(0.01, (peak - freed) / max(1, self._device_bytes()))) / 100

    def _room_for_inputs(self, batch_BT: Sequence[int], windows: int) -> bool:
        """Whether the host can hold the inputs of all layers for a window."""
        rows, hidden = -(-batch_BT[0] // windows), self.config.get_text_config().hidden_size
        needed = len(self.structure.layers) * rows * batch_BT[1] * hidden * self._compute.itemsize
        return needed + LADDER_RESERVE_BYTES < available_host_bytes()

    def _room_for_windows(self) -> bool:
        """Whether gradients can be summed over more windows: it takes a gradient plane, in fp32."""
        dtype = self.store.grad_dtype
        if dtype is None:
            return False
        wider = (4 - dtype.itemsize) * sum(unit.layout.numel for unit in self.structure.units)
        return wider == 0 or wider + LADDER_RESERVE_BYTES < available_host_bytes()

    def _rearrange(self, windows: int, leaving: Sequence[str]) -> None:
        """Other buffers around the same state: more windows, units that leave the device. No step is in progress."""
        self.wait_saved()  # a writer reads the planes where they lie
        self._optimizer.wait_all()
        self._streams.synchronize()
        shell = self._runner.shell
        self._close_flows()
        # What holds device memory goes before its successor comes.
        del self._runner, self._weights, self._gradients, self._inputs
        self._windows = windows
        try:
            for name in leaving:
                self.store.move_to_host(name)
            if windows > 1:
                self.store.widen_gradients()
            if self._streams.cuda:
                torch.cuda.empty_cache()
            self._make_flows()
            self._runner = self._new_runner(shell)
        except BaseException:  # without its buffers the engine is none
            self._closed = True
            self._optimizer.close()
            self.store.close()
            raise

    def _decide(self, loss: float, norm: float) -> str | None:
        """The finite guard: a reason to skip the update, or None. Skipping leaves every byte of the state as it was."""
        finite = math.isfinite(loss) and math.isfinite(norm)
        if self._loss_scale:
            self._loss_scale = self._loss_scale.after(finite)
        if finite:
            return None
        if self._route is Route.EATEN:
            self.close()
            raise NumericStop(
                f"step {self.step}: loss {loss}, gradient norm {norm}; without a gradient plane some units were already updated\n"
                "  -> resume from the last checkpoint; gradient_plane=True skips such steps instead"
            )
        what = "loss" if not math.isfinite(loss) else "gradient norm"
        return f"{what} is not finite"

    def _update(self, norm: float, loss_scale: float, learning_rate: float | None) -> None:
        """Launch AdamW for every unit and forget the weights on the device."""
        self.updates += 1
        if self._route is not Route.EATEN:
            clip = self.optim.max_grad_norm
            coefficient = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
            coefficients = StepCoefficients.of(self.optim, self.updates, learning_rate, coefficient / loss_scale)
            with self._streams.traced("update of resident units") if self._placement.resident else nullcontext():
                self._optimizer.launch(coefficients, self._gradients.arrived)
        self._weights.drop_all()

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
        self._gradients.settle()
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
        directory: str | Path,
        extra: dict[str, Any] | None = None,
        *,
        wait: bool = True,
        weights_only: bool = False,
        on_error: Literal["stop", "warn"] = "stop",
        buffer_bytes: int | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> RunningSave:
        """Write a checkpoint that `from_pretrained` loads and from which `load` goes on bit for bit.

        Args:
            directory: A folder that does not exist yet.
            extra: JSON data to keep with it, returned by `load`.
            wait: False returns at once; the state of this moment is written while training goes on, see
                [Note: a unit while a save runs] in checkpoint/background.py. A second save waits for the first.
            weights_only: bf16 weights without training state, 2 bytes a parameter.
            on_error: What the next step does if a save in the background has failed: raise its error, or log a warning.
            buffer_bytes: Most memory for copies of units whose update comes before their turn. By default as much as all of them
                need, within half of the host memory that is free at this moment, and never less than two large units. Copies
                leave the host its last GiB in any case.
            then: Called, in the writer's thread, when the checkpoint is whole and was read back.

        Returns:
            The save: `done()`, `progress()`, `result()`.

        Raises:
            UserError: The folder exists, the disk has no room, or (with `wait`) the system refuses a write.
        """
        desk = self._usable_desk()
        if wait:
            self._optimizer.wait_all()
        if self.store.resident_bytes:
            self._streams.synchronize()  # the writer copies them on a stream of its own
        state = {
            "step": self.step,
            "updates": self.updates,
            "seed": self.seed,
            "loss_scale": self._loss_scale.state_dict() if self._loss_scale else None,
            "ladder": {**self._denser.as_dict(), "device_bytes": self._device_bytes()},
            "extra": extra or {},
        }
        self._optimizer.saving = saving = desk.start_save(
            Path(directory),
            state,
            self._optimizer.pending(),
            wait=wait,
            weights_only=weights_only,
            on_error=on_error,
            buffer_bytes=buffer_bytes,
            then=then,
        )
        if wait:
            saving.result()
            self._forget_ended_save()
        return saving

    def wait_saved(self) -> None:
        """Wait until no save is in progress. Raises, or warns of, an error that nobody has been told of."""
        self._usable_desk().wait_saved()
        self._forget_ended_save()

    def cancel_save(self) -> None:
        """Give up the save in progress, if there is one. Nothing of it is left; older checkpoints are as they were."""
        if self._desk is not None and self._desk.saving is not None:
            self._desk.saving.cancel()
            self._forget_ended_save()

    def load(self, directory: str | Path, *, wait: bool = True) -> dict[str, Any]:
        """Restore weights, moments, step and scaler from a checkpoint.

        Args:
            directory: A complete checkpoint of this model.
            wait: False returns when the units on the device are there; the others stream in while the first forward runs,
                see [Note: lazy reading] in checkpoint/reader.py. A damaged tensor is then found by the step that needs it.

        Returns:
            The `extra` it was saved with.

        Raises:
            UserError: The checkpoint is damaged, or another model's. If it was found before anything was restored, the engine
                is as it was; otherwise the engine refuses to compute until a load succeeds.
        """
        desk = self._open_desk()
        refuse_other_config(Path(directory), self.config)
        desk.wait_saved()
        self._forget_ended_save()
        self._optimizer.forget(desk.give_load_up())
        self._optimizer.wait_all()
        self._streams.synchronize()
        loading, state = desk.start_load(Path(directory))
        self._optimizer.expect(loading.futures)
        self._weights.drop_all()
        self.step, self.updates, self.seed = state["step"], state["updates"], state["seed"]
        if self._loss_scale and state.get("loss_scale"):
            self._loss_scale = LossScale.from_state_dict(state["loss_scale"])
        loading.wait(None if wait else [name for name, planes in self.store.units.items() if planes.resident])
        self._streams.synchronize()
        self._go_on_denser(state.get("ladder") or {})
        return state["extra"]

    def _go_on_denser(self, ladder: dict[str, Any]) -> None:
        """What the ladder had chosen when a checkpoint was made holds again, unless this device has more memory."""
        denser, then = Denser.from_dict(ladder), ladder.get("device_bytes")
        if self._segment > 1:  # it drops inputs that would wait in host memory
            denser = replace(denser, offload=False)
        if denser == Denser() or self._route is Route.EATEN or (then or 0) < self._device_bytes():
            return
        self._adopt(denser)
        logger.info("as before this checkpoint: %s (the device ran out of memory)", ", ".join(denser.changes))

    def _device_bytes(self) -> int:
        """Device memory that the engine may use, 0 on a CPU."""
        if not self._streams.cuda:
            return 0
        total = torch.cuda.get_device_properties(self.device).total_memory
        return total if self._device_gib is None else min(total, int(self._device_gib * 2**30))

    def _open_desk(self) -> CheckpointDesk:
        if self._closed:
            raise EngineClosed("the engine is closed")
        assert self._desk is not None
        return self._desk

    def _usable_desk(self) -> CheckpointDesk:
        desk = self._open_desk()
        desk.refuse_mixture()
        return desk

    def _forget_ended_save(self) -> None:
        """Tell the owner of a save that has ended with an error; updates need not look at it any more."""
        assert self._desk is not None
        self._optimizer.saving = None if self._desk.saving is None or self._desk.saving.done() else self._desk.saving
        self._desk.look_at_save()

    def memory(self) -> dict[str, int]:
        """Bytes: `host_<plane>`, `host_slabs`, `host_pinned`, `device_resident`, `device_slots`, `device_gradients`,
        `device_peak`."""
        peak = torch.cuda.max_memory_allocated(self.device) if self._streams.cuda else 0
        return {
            **{f"host_{kind}": size for kind, size in self.store.plane_bytes().items()},
            "host_inputs": self._inputs.nbytes,
            "host_slabs": sum(slab.nbytes for slab in self._all_slabs()),
            "host_pinned": self._pinned_bytes(),
            "device_resident": self.store.resident_bytes,
            "device_slots": self._weights.nbytes,
            "device_gradients": self._gradients.nbytes,
            "device_peak": peak,
        }

    def _all_slabs(self) -> list[Slab]:
        return [*(self._slabs.slabs if self._slabs else []), *self._edge_slabs.values()]

    def _pinned_bytes(self) -> int:
        staged = self._copier.pinned_bytes if isinstance(self._copier, StagedCopier) else 0
        slabs = sum(slab.pinned_bytes for slab in self._all_slabs())
        return self.store.pinned_bytes + slabs + staged + self._inputs.pinned_bytes

    def close(self) -> None:
        """Wait for background work, then give all memory back. A closed engine refuses every further call."""
        if self._closed:
            return
        self._closed = True
        if self._desk is not None:
            self._desk.close()
        self._streams.synchronize()
        self._optimizer.close()
        self._close_flows()
        self.store.close()

    def __enter__(self) -> HostEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---------------------------------------------------------------- construction

    def _fill(self, model: str | Path | nn.Module, init: str | None, buffers: dict[str, torch.Tensor]) -> None:
        """Masters and persistent buffers, from memory, from the family's own initialisation or from the folder's files."""
        if isinstance(model, nn.Module):
            copy_from_memory(model, self.structure, self.store)
        elif init == "random":
            initialize(self.structure, self.store, seed=self.seed, device=self.device)
        elif init == "empty":
            pass  # the engine refuses to compute before `load`
        else:
            assert self.source_folder is not None
            load_weights(self.source_folder, self.structure, self.store, buffers)

    def _make_flows(self) -> None:
        """What moves weights in, gradients out, and updates behind them."""
        chosen = self._flows
        pinned = pin_planes(self.store, self._streams, chosen.pin)
        self._optimizer = HostOptimizer(
            self.store, self.structure.units, self.structure.frozen, self.optim, self._updater
        )
        self._copier = make_copier(self.store, self._streams, pinned)
        gate = UpdateGate(self._optimizer.finished, self._wait_for_update)
        self._weights = make_weight_stream(
            self.structure, self.store, self._streams, self._copier, self._compute, chosen.weight_slots, gate
        )
        direct = pinned and self._windows == 1
        self._route = Route.EATEN if not chosen.gradient_plane else Route.DIRECT if direct else Route.ADDED
        if self._route is not Route.DIRECT:
            self._slabs, self._edge_slabs = make_slabs(
                self.structure, self.store, self._streams, chosen.gradient_slabs, chosen.transport
            )
        self._gradients = GradientFlow(
            self._streams,
            self.store,
            self.structure.units,
            self._route,
            chosen.transport,
            self._slabs,
            self._edge_slabs,
            self._optimizer,
            chosen.poison,
        )
        offloaded = range(len(self.structure.layers)) if self._denser.offload else self._placement.offloaded
        self._inputs = InputStore(self._streams, offloaded)

    def _close_flows(self) -> None:
        """Give back what `_make_flows` has made; nothing runs any more."""
        self._copier.close()
        self._inputs.close()
        self._runner.close()
        for slab in self._all_slabs():
            slab.close()

    def _make_runner(
        self,
        fp32_names: frozenset[str],
        device_buffers: dict[str, torch.Tensor],
        budget: float,
        mlp_chunk_tokens: int | None,
    ) -> None:
        """HF's code around the layers, and the loop that drives it; each calls the other."""
        shell = Shell(
            self.structure,
            device_buffers,
            lambda *call: self._runner.run_layer(*call),
            fp32_names,
            self._compiled,
            budget,
            flex=self._compiled and self._streams.cuda,
            chunk_tokens=mlp_chunk_tokens,
            token_wise=self._places,
        )
        self._runner = self._new_runner(shell)

    def _new_runner(self, shell: Shell) -> StepRunner:
        flows = (self._streams, self._weights, self._gradients, self._inputs)
        return StepRunner(shell, *flows, self._compiled, self._interrupt)

    # ---------------------------------------------------------------- small parts

    _gradient_scale = 1.0

    def _checked(self, batch: Batch) -> tuple[Batch, int]:
        self._refuse_closed()
        checked, tokens = batches.checked(
            batch, self.config.get_text_config().vocab_size, batches.most_positions(self.config)
        )
        if self._packing_asks is not None and batches.is_packed(checked):
            attention, trust_remote_code = self._packing_asks
            verify_packing(self.config, attn_implementation=attention, trust_remote_code=trust_remote_code)
            self._packing_asks = None
        return checked, tokens

    def _shape(self, batch: Batch) -> StepShape:
        rows, tokens = batch["input_ids"].shape
        vocabulary = self.config.get_text_config().vocab_size
        planned = StepShape(
            windows=min(self._windows, rows),
            chunk_rows=self._chunk_rows or max(1, DEFAULT_CHUNK_TOKENS // tokens),
            head_tokens=self._head_chunk_tokens or head_chunk_tokens_of(vocabulary, self._compiled),
            segment=self._segment,
            kept=self._placement.kept,
            selective=self._placement.selective,
            attention=self._placement.attention,
            mlp=self._placement.mlp,
        )
        return self._denser.applied_to(planned)

    def _attention_order(self, batch: Batch) -> tuple[SDPBackend, ...]:
        """Attention backends, fastest first, for rows of this length; torch's own choice where nothing can be measured."""
        shape = attention_shape(self.config.get_text_config())
        if not self._streams.cuda or self._compute == torch.float32 or shape is None:
            return ()
        tokens = batch["input_ids"].shape[1]
        return tuple(b for b, _ in measured_backends(*shape, tokens, self._compute, self.device))

    def _reset_counters(self) -> None:
        self._weights.update_wait_s = 0.0
        self._weights.loaded_bytes = self._gradients.sent_bytes = 0
        self._inputs.out_bytes = self._inputs.back_bytes = 0
        if self._slabs:
            self._slabs.reset_counters()

    def _moved_bytes(self) -> dict[str, int]:
        return {
            "h2d": self._weights.loaded_bytes + self._inputs.back_bytes,
            "d2h": self._gradients.sent_bytes + self._inputs.out_bytes,
        }

    def _seconds(self, started: float) -> dict[str, float]:
        seconds = {"update_wait": self._weights.update_wait_s, "slab_wait": self._slabs.wait_s if self._slabs else 0.0}
        seconds |= self._runner.phase_seconds()
        seconds["step"] = time.perf_counter() - started
        return seconds

    def _failure_of(self, error: torch.OutOfMemoryError) -> Failure:
        """What is known while the failed step's memory is still held."""
        ledger = self.memory()
        if self._streams.cuda:
            ledger["allocated now"] = torch.cuda.memory_allocated(self.device)
            ledger["reserved by the allocator"] = torch.cuda.memory_reserved(self.device)
            ledger["free on the device"] = torch.cuda.mem_get_info(self.device)[0]
        return Failure(str(error).splitlines()[0], self._runner.where(), ledger)

    def _wait_for_update(self, unit: str) -> None:
        """The device is kept waiting only where the update has not ended yet; an ended one may have an error to raise."""
        if self._optimizer.finished(unit):
            self._optimizer.wait(unit)
            return
        with self._streams.host_waits("optimizer"):
            self._optimizer.wait(unit)

    def _pipeline(self, batch: Batch) -> PipelineRecord | None:
        policy = self._policy(self._shape(batch))
        return self.instruments.record(self._slabs, self._pinned_bytes(), policy, self._denser.changes)

    def _policy(self, shape: StepShape) -> str:
        """How a step is computed, in a line."""
        kept = Counter(shape.variants().values())
        parts = [f"{name} {count}" for name, count in kept.items()]
        if recomputed := len(self.structure.layers) - kept.total():
            parts.append(f"recompute {recomputed}")
        parts += [
            f"windows {shape.windows}",
            f"chunk_rows {shape.chunk_rows}",
            f"head_chunk_tokens {shape.head_tokens}",
        ]
        extras = {"segment": shape.segment if shape.segment > 1 else 0, "offloaded": len(self._inputs.layers)}
        parts += [f"{name} {count}" for name, count in extras.items() if count]
        resident = sum(planes.resident for planes in self.store.units.values())
        return ", ".join([*parts, f"resident {resident} of {len(self.store.units)}"])

    def _refuse_closed(self) -> None:
        self._usable_desk()


@dataclass(frozen=True)
class _FlowSettings:
    """What the device side is made from, again when the ladder changes it."""

    pin: Literal["auto", "all", "staged"]
    weight_slots: int
    gradient_plane: bool
    gradient_slabs: int
    transport: torch.dtype
    poison: bool


class _Abandon:
    """On any error inside, drop what the step has built, so that the engine can go on. Weights are as before the step."""

    def __init__(self, engine: HostEngine):
        self._engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is None:
            return
        if self._engine._route is Route.EATEN:
            logger.error("a step failed after some units may have been updated; the engine is closed")
            self._engine.close()
            return
        if isinstance(error, torch.OutOfMemoryError):
            self._engine._failure = self._engine._failure_of(error)
        self._engine._runner.abandon()

"""`HostEngine`: a Hugging Face model trained from host memory, one call per optimizer step.

The store holds the planes (host memory); the device buffers stream weights in and gradients out; the step runner drives HF's
code between them; the optimizer updates the planes in the background. This file says what a step is made of, and how the
engine's state is read, saved and loaded.
"""

from __future__ import annotations

import copy
import datetime
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend

from megatrain.checkpoint.async_save import SaveHandle, SaveProgress
from megatrain.checkpoint.host_checkpoints import HostCheckpoints
from megatrain.checkpoint.manager import CheckpointManager, SaveOptions
from megatrain.checkpoint.reader import load_masters
from megatrain.device.allocator import configure_allocator
from megatrain.device.attention import attention_order, deterministic_kernels, fastest_attention
from megatrain.device.compiler import start_workers
from megatrain.device.shards import Shards
from megatrain.device.streams import Streams
from megatrain.engine import batches
from megatrain.engine.base import (
    Batch,
    Engine,
    EvalResult,
    StepResult,
    build_model,
    check_learning_rate,
    config_of,
    refuse_dropout,
    refuse_unmatched_groups,
    skip_reason,
)
from megatrain.engine.host import rng as randomness
from megatrain.engine.host.buffers import DeviceBuffers
from megatrain.engine.host.gradients import Route
from megatrain.engine.host.head import LossSums
from megatrain.engine.host.instruments import Debug, Instruments
from megatrain.engine.host.layer import StepAborter
from megatrain.engine.host.oom import OomRecovery, limit_device
from megatrain.engine.host.optimizer import HostOptimizer, LossScale
from megatrain.engine.host.routing import Routing
from megatrain.engine.objective import CrossEntropy, Objective, Statistics, StepTotals
from megatrain.engine.parity_check import token_wise, verify_family, verify_packing
from megatrain.engine.plan import ExecutionPlan, StepShape, device_of
from megatrain.engine.sequences import SequenceLogprobs
from megatrain.errors import NumericStop, PlanRefused, UserError
from megatrain.host_memory.available import available_host_bytes
from megatrain.host_memory.store import HostStore, UnitPlanes
from megatrain.metrics.laps import Laps
from megatrain.metrics.record import MeshRecord
from megatrain.metrics.spans import Span
from megatrain.models import routers
from megatrain.models.build import find_model_folder, refuse_other_config
from megatrain.models.lora import Adapter, Lora
from megatrain.models.shell import Shell
from megatrain.models.structure import attention_shape, dissect, fp32_parameter_names, persistent_buffers
from megatrain.models.trainable import Trainable
from megatrain.models.weights import copy_from_memory, initialize
from megatrain.optim.spec import MASTER_BYTES, OptimizerSpec
from megatrain.optim.updater import CpuUpdater
from megatrain.units import GIB, abbreviated, gibs, size_lines

logger = logging.getLogger(__name__)
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
        router_loss: The auxiliary loss of a mixture of experts: None follows the model's config (`output_router_logits`), False
            is off, True is on with the model's coefficient, a number is on with this coefficient.
        router_bias_speed: Update speed of the routers' correction biases; None: they are not trained. See
            [Note: balancing by biases] in models/routers.py.
        trainable: The parameters to train; by default those with `requires_grad`, which are all of a model from a folder.
        lora: Train an adapter of this kind; the model's own weights are frozen. See `save_adapter`.
        debug: Settings for tests and measurements.
        group: torch.distributed's default group (`dist.group.WORLD`), if its ranks train one model together, one device each.
            Every rank then makes the engine and calls its methods alike, with the same arguments: the batch of a step is the
            whole batch, of which each rank computes its share. None: this process trains alone.
        timeout: Of collectives; by default torch's.

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
        router_loss: bool | float | None = None,
        router_bias_speed: float | None = None,
        trainable: Trainable | None = None,
        lora: Lora | None = None,
        debug: Debug | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: datetime.timedelta | None = None,
    ):
        super().__init__(optim, objective, seed)
        laps = Laps()
        self.start_seconds = laps.seconds
        for name, value, words in (("init", init, INITS), ("verify", verify, VERIFY)):
            if value not in words:
                raise UserError(f"{name} = {value!r} is not one of {', '.join(map(str, words))}", "HostEngine")
        self.device, debug = device_of(device), debug or Debug()
        configure_allocator(self.device)
        plan = plan or ExecutionPlan()
        self._shards = Shards(group, self.device, timeout, plan.replicas)
        plan = plan.for_device(self.device, self.optim, self._shards.cores)
        self._aborter = StepAborter()
        self._computing = threading.Lock()
        self._warm = False  # whether `_warm_up` has run
        self._stepped = False
        self._own_work_s: float | None = None  # of the latest step
        self._gradient_scale = 1.0
        self._routing: Routing | None = None  # of the latest step
        self._loss_scale = LossScale() if plan.compute == torch.float16 else None
        device_bytes = limit_device(self.device, plan.device_gib)

        # From here on the engine's four parts are made, as docs/design.md lists them: the model without weights, taken apart;
        meta = build_model(
            model, config_of(model, trust_remote_code), plan.compute, trust_remote_code, plan.attn_implementation
        )
        self.source_folder = None if isinstance(model, nn.Module) else find_model_folder(model)
        self.config, self.buffers = meta.config, dict(meta.named_buffers())
        self.adapter = Adapter(meta, lora) if lora is not None else None
        if lora is not None and lora.dropout and self._shards.many:
            raise UserError("dropout of the adapter needs a single process", "train.lora.dropout", "set it to 0")
        if trainable is not None:
            trainable.apply(meta)
        self.structure = dissect(meta).padded(self._shards.shard)
        self.router_loss = routers.router_loss(meta, router_loss)
        self._bias_speed = router_bias_speed
        self._biases = routers.trained_biases(meta, self.structure.layers_name, router_bias_speed)
        if self._shards.many:
            refuse_dropout(self.config)
        if verify == "always" or (verify == "auto" and self.source_folder is not None):
            always = verify == "always"
            verify_family(
                self.config,
                parity_engine,
                always=always,
                trust_remote_code=trust_remote_code,
                router_loss=self.router_loss is not None,
            )
        refuse_unmatched_groups(self.structure, self.optim)
        # Stored here because the shell changes the config's implementation for packed rows.
        self._unverified_packing = None if verify == "never" else (self.config._attn_implementation, trust_remote_code)
        plan = plan.for_model(self.structure, self.config.get_text_config().vocab_size)
        self._shapes = (plan.train_shape, plan.eval_shape) if plan.compiled else (None, None)

        if plan.compiled:
            start_workers()

        laps.end("model")
        self.store = self._make_store(plan)
        laps.end("memory")
        with self._filling(model, init, persistent_buffers(meta)):
            laps.end("random weights" if init == "random" else "weights")
            mirrors = self._make_parts(meta, plan, device_bytes, init == "empty", trust_remote_code, debug)
            laps.end("memory")
            if init != "empty":
                self._warm_up()
            laps.end("compilation")
        laps.end("weights")  # the rest of their reading
        for name, mirror in mirrors.items():  # persistent buffers have been read meanwhile
            mirror.copy_(self.buffers[name])
        if self._shards.many:  # h2d reads resident shards, which were written on compute
            self._streams.synchronize()

    def _make_parts(
        self,
        meta: Any,
        plan: ExecutionPlan,
        device_bytes: int,
        empty: bool,
        trust_remote_code: bool,
        debug: Debug,
    ) -> dict[str, torch.Tensor]:
        """Make the engine's parts around the planes, as docs/design.md lists them. Returns the buffers on the device."""
        # Optimizer;
        self._streams = Streams(self.device, debug.disturb, collectives=self._shards.many)
        self.instruments = Instruments(self._streams, self.store, debug.instruments)
        assert plan.threads is not None
        self._updater = CpuUpdater(plan.threads, self._streams.spans.add)
        self._optimizer = HostOptimizer(
            self.store,
            self.structure.units,
            self.structure.frozen,
            self.structure.undecayed,
            self.optim,
            self._updater,
        )
        self._optimizer.compile_kernels(plan.gradient_dtype or plan.transport)

        # device buffers;
        mirrors = self._mirrors = {name: buffer.to(self.device) for name, buffer in self.buffers.items()}
        shell = self._make_shell(plan, mirrors, frozenset(fp32_parameter_names(meta, plan.compute)), trust_remote_code)
        self._device_side = DeviceBuffers(
            self.store,
            self._streams,
            self._optimizer,
            shell,
            self.objective,
            self._aborter,
            plan,
            debug.poison,
            self._shards,
            self.router_loss,
        )

        # OOM recovery and checkpoints.
        self._oom = OomRecovery(
            self._device_side, plan, self.config, device_bytes, self._rearrange, self.close, not self._shards.many
        )
        self._host_checkpoints = HostCheckpoints(
            self.structure,
            self.store,
            self.optim,
            self.buffers,
            mirrors,
            self.source_folder,
            trust_remote_code,
            self.device,
            self._optimizer.pending,
            self._shards,
            self.shipped,
        )
        self._checkpoints = CheckpointManager(self._host_checkpoints, empty=empty)
        self._masks_tokens = bool(shell.watched)
        return mirrors

    def _make_store(self, plan: ExecutionPlan) -> HostStore:
        """The planes, in host memory and on the device.

        Raises:
            PlanRefused: The host has no room for its planes. The message lists them.
        """
        structure, optim = self.structure, self.optim
        is_split, grad_dtype, resident = plan.compute == torch.bfloat16, plan.gradient_dtype, frozenset(plan.resident)
        shard = self._shards.shard
        on_host = [unit.layout for unit in structure.units if unit.name not in resident]
        trained = sum(shard.trained_numel(layout) for layout in on_host)
        frozen = sum(shard.numel(layout) for layout in on_host) - trained
        states_line = f"{optim.name} states ({' + '.join(state.name for state in optim.states)})"
        planes = {
            "master (hi + lo)" if is_split else "master": MASTER_BYTES * trained,
            states_line: math.ceil((optim.bytes_per_parameter - MASTER_BYTES) * trained),
            "gradient plane": (grad_dtype.itemsize if grad_dtype else 0) * trained,
            "frozen weights": (2 if is_split else MASTER_BYTES) * frozen,
        }
        needed = self._shards.here * sum(planes.values())  # the ranks of this host allocate at the same time
        available = available_host_bytes() if plan.host_gib is None else int(plan.host_gib * GIB)
        if needed > available:
            lines = "\n".join(size_lines(planes, smallest_bytes=0))
            lines += f"\n    on each of {self._shards.here} ranks" if self._shards.many else ""
            needs, there = gibs(needed, available)
            least = math.ceil(100 * needed / GIB) / 100
            limit = f"memory.host_gib: {least:g} (now {plan.host_gib:g}), " if plan.host_gib is not None else ""
            raise PlanRefused(
                f"{abbreviated(structure.param_count)} parameters need {needs} of host memory, "
                f"{there} are available:\n{lines}\n"
                f"  -> {limit}a machine with more memory, or a smaller model"
            )
        return HostStore(
            [(unit.name, unit.layout) for unit in structure.units],
            split=is_split,
            states=optim.state_dtypes,
            grad_dtype=grad_dtype,
            resident=resident,
            device=self.device,
            shard=shard,
            whole_dtype=torch.promote_types(plan.compute, torch.float32),
        )

    @contextmanager
    def _filling(
        self, model: str | Path | nn.Module, init: str | None, persistent: dict[str, torch.Tensor]
    ) -> Iterator[None]:
        """Fill the planes; files are read by another thread while the body runs. All is filled at the end.

        Other sources are done before: random initialisation uses torch's generators and the model's own modules.
        """
        structure, store = self.structure, self.store
        if self.adapter is not None:
            structure, store = self.adapter.plain, self.adapter.base_of(store)
            units = {name: (unit, local) for unit in self.structure.units for local, name in unit.full_names()}
            for name, value in self.adapter.initial(self.seed):
                unit, local = units[name]
                self.store.units[unit.name].write_master(local, value)
        if isinstance(model, nn.Module):
            copy_from_memory(model, structure, store)
        elif init == "random":
            initialize(structure, store, seed=self.seed, device=self.device)
        if isinstance(model, nn.Module) or init is not None:
            yield
            return

        # Hugging Face's conversion hangs tensors into the model for a moment: it gets a copy, whose parameters are on meta.
        twin = replace(structure, model=copy.deepcopy(structure.model))
        ended = threading.Event()

        def check() -> None:
            if ended.is_set():
                raise CancelledError

        def read(folder: Path) -> None:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                load_masters(folder, twin, store, persistent_buffers(twin.model), check)

        assert self.source_folder is not None
        with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
            try:
                reading = pool.submit(read, self.source_folder)
                yield
                reading.result()
            except BaseException:
                ended.set()  # the pool waits for its thread
                raise
        for name, buffer in persistent_buffers(twin.model).items():
            persistent[name].copy_(buffer)

    def _warm_up(self) -> None:
        """Compile what steps on the plan's batch shapes run, so that none compiles in the middle of the run.

        The weights may still be on their way: results are dropped, and the state stays as it is.
        """
        self._warm = True
        if self._device_side.route is Route.FUSED_UPDATE:
            return
        for shape, training in zip(self._shapes, (True, False), strict=True):
            for length in shape.lengths if shape is not None else ():
                assert shape is not None
                example = self.objective.example(shape.example(length))
                if example is None:
                    return
                batch = self._share_of_rank(example)
                try:
                    with self.instruments.paused(), self._kernels(batch), randomness.seeded(self.device, self.seed, 0):
                        self._device_side.runner.warm_up(batch, self._oom.shape(batch["input_ids"].shape), training)
                except torch.OutOfMemoryError as error:  # the step itself knows what to do
                    if self._shards.many:  # the others wait in a collective
                        raise
                    logger.debug("no compilation ahead of the first step: %s", error)
                    return
        self._device_side.weights.drop_all()

    def _make_shell(
        self,
        plan: ExecutionPlan,
        mirrors: dict[str, torch.Tensor],
        fp32_names: frozenset[str],
        trust_remote_code: bool,
    ) -> Shell:
        """HF's code around the layers; `mirrors` are the buffers on the device. See `Shell`."""
        assert isinstance(plan.activations, Mapping)
        # Read now: the shell changes the config's implementation for packed rows, and may ask in the middle of a run.
        attention = plan.attn_implementation or self.config._attn_implementation
        shell = Shell(
            self.structure,
            mirrors,
            lambda *call: self._device_side.runner.layers.forward(*call),
            fp32_names,
            plan.compiled,
            plan.selective_budget,
            flex=plan.compiled and self._streams.cuda,
            deterministic=plan.deterministic,
            keeps_mlps="keep_mlp" in plan.activations.values(),
            token_wise=lambda: token_wise(
                self.config, attn_implementation=attention, trust_remote_code=trust_remote_code
            ),
            router_loss=self.router_loss,
            needs_loads=bool(self._biases),
        )
        if plan.mlp_chunk_tokens is not None:
            shell.compute_in_chunks(plan.mlp_chunk_tokens)
        return shell

    @property
    def plan(self) -> ExecutionPlan:
        """The plan in effect, resolved for the model and the device; OOM recovery may have reduced it."""
        return self._oom.plan

    # ---------------------------------------------------------------- training

    def train_step(self, batch: Batch, learning_rate: float | None = None) -> StepResult:
        """See `Engine.train_step`. Updates run in the background when it returns.

        Raises:
            NumericStop: Without a gradient plane, gradients were not finite and some units were already updated.
        """
        check_learning_rate(learning_rate)
        first, self._stepped = not self._stepped, True
        with self.watch("first_step" if first else "step", f"step {self.step + 1}"):
            return self._train_step(batch, learning_rate)

    def _train_step(self, batch: Batch, learning_rate: float | None) -> StepResult:
        started = time.perf_counter()
        batch, step, together = self._checked(batch)
        self._checkpoints.check_save()
        if (tokens := step.counts["tokens"]) == 0:
            self.step += 1
            return StepResult(None, None, 0, "no target tokens", {"step": time.perf_counter() - started})
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        if self._device_side.route is Route.FUSED_UPDATE:
            self._optimizer.coefficients = self.optim.coefficients(self.updates + 1, learning_rate)
        loss, norm, metrics, routing = self._forward_backward(batch, step, together, scale)
        self.step += 1
        skipped = self._decide(loss, norm)
        if skipped is None:
            self._update(norm, scale, learning_rate)
            self._balance_biases()
        return self._result(batch, tokens, loss, norm, metrics, routing, skipped, started)

    def backward(self, batch: Batch) -> StepResult:
        """See `Engine.backward`. Needs gradient planes."""
        started = time.perf_counter()
        if self._device_side.route is Route.FUSED_UPDATE:
            raise UserError("this engine keeps no gradients", "gradient_plane=False", "leave gradient_plane at True")
        batch, step, together = self._checked(batch)
        if (tokens := step.counts["tokens"]) == 0:
            return StepResult(None, None, 0, "no target tokens")
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        loss, norm, metrics, routing = self._forward_backward(batch, step, together, scale)
        return self._result(batch, tokens, loss, norm, metrics, routing, "gradients only", started)

    def eval_step(self, batch: Batch) -> EvalResult:
        """See `Engine.eval_step`."""
        batch, step, _ = self._checked(batch, training=False)
        if (tokens := step.counts["tokens"]) == 0:
            return EvalResult(0.0, 0)

        def compute(shape: StepShape) -> tuple[float, dict[str, float], list[float]]:
            known = self._with_statistics(batch, shape, step, passes=1)
            sums = self._device_side.runner.loss(batch, shape, step=known)
            return sums.wait(shards=self._shards, names=self._metric_names(sums))

        with self.instruments.paused(), self.watch("evaluation"):
            loss_sum, metric_sums, _ = self._until_it_fits(batch, compute, training=False)
        return EvalResult(loss_sum, tokens, metric_sums, step.counts)

    def sequence_logprobs(self, batch: Batch) -> torch.Tensor:
        """See `Engine.sequence_logprobs`."""
        objective = SequenceLogprobs()
        batch, step, _ = self._checked(batch, training=False, objective=objective)
        if step.counts["tokens"] == 0:
            return torch.zeros(0)

        def compute(shape: StepShape) -> torch.Tensor:
            sums = self._device_side.runner.loss(batch, shape, step=step, objective=objective)
            return self._shards.total(sums.metrics["logprobs"]).float().cpu()

        with self.instruments.paused(), self.watch("evaluation"):
            return self._until_it_fits(batch, compute, training=False)

    def _with_statistics(self, batch: Batch, shape: StepShape, step: StepTotals, passes: int) -> StepTotals:
        """`step` with the objective's statistics, if it needs some and this is not a single pass over all rows."""
        if not self.objective.has_statistics or (passes == 1 and not self._shards.many):
            return step
        sums = self._device_side.runner.loss(batch, shape, step=step, objective=Statistics(self.objective))
        _, found, _ = sums.wait(shards=self._shards, names=self._metric_names(sums))
        return replace(step, statistics=found)

    def step_over_ranks(self) -> MeshRecord | None:
        """See `Engine.step_over_ranks`; None for one process, and without instruments.

        A rank's own work is the device time of its step without waits: ranks that are fast wait in the collectives.
        """
        if not self._shards.many or self._own_work_s is None:
            return None
        found = self._shards.each((self._own_work_s, self._device_side.memory()["device_peak"]))
        work = [seconds for seconds, _ in found]
        slowest = max(range(len(work)), key=work.__getitem__)
        return MeshRecord(
            stage_busy_s=(sum(work) / len(work),),
            stage_peak_bytes=(int(max(peak for _, peak in found)),),
            slowest_rank=slowest,
            slowest_excess=work[slowest] / max(statistics.median(work), 1e-9) - 1.0,
        )

    def begin_trace(self) -> None:
        """Record layer fetches, too, until `end_trace`."""
        self.instruments.begin_trace()

    def end_trace(self) -> list[Span]:
        """All spans recorded since `begin_trace`. Waits for the updates of the latest step."""
        self.synchronize()
        return self.instruments.end_trace()

    def interrupt(self, error: BaseException) -> bool:
        """See `Engine.interrupt`. Without a gradient plane a step cannot be dropped, nor on one of several ranks."""
        if self._device_side.route is Route.FUSED_UPDATE or self._shards.many:
            return False
        self._aborter.error = error
        return True

    def _forward_backward(
        self, batch: Batch, step: StepTotals, together: int, loss_scale: float
    ) -> tuple[float, float, dict[str, float], dict[str, float]]:
        """(loss, gradient norm, metrics, figures of the routers) of the step, waited for. The gradients are on the host or on
        their way.

        `batch` has the rows of this rank, `step` describes the rows of all ranks.
        """
        self._gradient_scale, shards = loss_scale, self._shards
        scale = loss_scale / step.counts[self.objective.per]

        def compute(shape: StepShape) -> tuple[float, float, dict[str, float], dict[str, float]]:
            known = step
            if self.objective.has_statistics:
                with self.instruments.paused():
                    known = self._with_statistics(batch, shape, step, shape.accumulation_steps)
            self._device_side.reset_counters()
            with self.instruments.step(self.step + 1):
                with randomness.seeded(self.device, self.seed, self.step):
                    sums, on_device, routing = self._device_side.runner.gradients(
                        batch, shape, scale, loss_scale=loss_scale, step=known, together=together
                    )
                figures = routing.figures() if routing is not None else {}
                self._routing = routing
                # the step's only synchronisation
                loss, metrics, [squares, *found] = sums.wait(
                    on_device, *figures.values(), shards=shards, names=self._metric_names(sums)
                )
                if self._device_side.route is not Route.COPY:
                    with self._streams.host_waits("slabs"):
                        self._device_side.gradients.settle()
                        if self._device_side.route is Route.ACCUMULATE:
                            squares = shards.total_of(self._optimizer.squared_norm())
            # `wait` adds up figures, which are equal on all ranks, and the squares of every replica of the gradient.
            routed = {n: v / shards.world for n, v in zip(figures, found, strict=True)}
            return loss, squares / shards.replicas, metrics, routed

        loss_sum, squares, metric_sums, routing = self._until_it_fits(batch, compute, training=True)
        norm = math.sqrt(squares) / loss_scale if squares >= 0 else math.nan
        loss, metrics = self.objective.means(loss_sum, metric_sums, step.counts)
        assert loss is not None, step.counts
        return loss, norm, metrics, routing

    def _until_it_fits(self, batch: Batch, compute: Callable[[StepShape], T], training: bool) -> T:
        """Run `compute` under OOM recovery; see `OomRecovery.until_it_fits`."""

        def attempt(shape: StepShape) -> T:
            with self._kernels(batch):
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
        """Reason to skip the update because the step is not finite, or None. Skipping leaves the state bit for bit as it was."""
        why = skip_reason(loss, norm)
        if self._loss_scale:
            self._loss_scale = self._loss_scale.after(why is None)
        if why is not None and self._device_side.route is Route.FUSED_UPDATE:
            self.close()
            raise NumericStop(
                f"step {self.step}: loss {loss}, gradient norm {norm}; without a gradient plane some units were already updated\n"
                "  -> resume from the last checkpoint; with gradient_plane=True the step would be skipped"
            )
        return why

    def _update(self, norm: float, loss_scale: float, learning_rate: float | None) -> None:
        """Launch the update of every unit, and invalidate the weights on the device."""
        self.updates += 1
        if self._device_side.route is not Route.FUSED_UPDATE:
            clip = self.optim.max_grad_norm
            coefficient = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
            coefficients = self.optim.coefficients(self.updates, learning_rate, coefficient / loss_scale)
            with self._streams.traced("update of resident units") if self.store.resident_bytes else nullcontext():
                self._optimizer.launch(coefficients, self._device_side.gradients.arrived)
        self._device_side.weights.drop_all()

    def _balance_biases(self) -> None:
        """Update the routers' correction biases by the loads of the step, the same on all ranks, on the host and the device."""
        for layer, name in self._biases.items():
            assert self._routing is not None and self._bias_speed is not None
            routers.balance_bias(self.buffers[name], self._routing.load(layer), self._bias_speed)
            if self._mirrors[name] is not self.buffers[name]:
                self._mirrors[name].copy_(self.buffers[name])

    # ---------------------------------------------------------------- state

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Engine.named_parameters`. Exact fp32 masters; waits for updates."""
        self._refuse_closed()
        for unit in self.structure.units:
            self._optimizer.wait(unit.name)
            whole = self._whole(self.store.units[unit.name])
            for local, name in unit.full_names():
                yield name, whole.read_master(local)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Engine.named_gradients`. In fp32."""
        self._refuse_closed()
        self._streams.synchronize()
        self._device_side.gradients.settle()
        for unit in self.structure.units:
            grad = self.store.units[unit.name].grad
            if grad is None and unit.layout.trained_numel == 0:
                grad = torch.empty(0)
            if grad is None:
                raise UserError(
                    f"the gradient of {unit.name} is gone: AdamW has used it",
                    "named_gradients",
                    "call backward() instead of train_step() to look at gradients of units on the device",
                )
            grad = self._whole_plane(grad, self.store.units[unit.name])
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
        """See `Engine.save`.

        A background save writes the state of this moment; see [Note: a unit while a save runs] in checkpoint/host_planes.py. By
        default `buffer_bytes` is what copies of all units need, within half of the host memory that is free now, but at least two
        large units; copies always leave the host its last GiB.
        """
        self._refuse_closed()
        if self.adapter is not None:
            raise UserError("checkpoints of an adapter are not supported yet", "HostEngine.save", "use save_adapter")
        if self.plan.compute == torch.float64:
            raise UserError("fp64 is for tests: checkpoints hold fp32", "HostEngine.save", "use compute_dtype fp32")
        if not background:
            self._optimizer.wait_all()
        if self.store.resident_bytes:
            self._streams.synchronize()  # the writer copies them on another stream
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

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter as a folder that `peft.PeftModel.from_pretrained` loads, in fp32. Collective; rank 0 writes."""
        self._refuse_closed()
        adapter, parameters = self._trained_adapter("save_adapter"), self.named_parameters()
        base = str(self.source_folder) if self.source_folder is not None else None
        own = [(name, value) for name, value in parameters if name not in adapter.original]
        if self._shards.rank == 0:
            adapter.save(folder, own, base)

    def load_adapter(self, folder: str | Path) -> None:
        """Set the adapter's weights from a PEFT adapter folder. Moments and step are not changed.

        Raises:
            UserError: It is an adapter of other modules or of another rank; nothing was changed.
        """
        self._refuse_closed()
        adapter = self._trained_adapter("load_adapter")
        self.synchronize()
        adapter.load(folder, self.structure, self.store)
        self._streams.synchronize()
        self._device_side.weights.drop_all()

    def adapter_off(self) -> AbstractContextManager[None]:
        """Inside, the engine computes with the base alone, for evaluations: the reference of a preference objective."""
        return self._trained_adapter("adapter_off").off()

    def _trained_adapter(self, method: str) -> Adapter:
        if self.adapter is None:
            raise UserError("the engine trains no adapter", f"HostEngine.{method}", "give it lora=Lora(...)")
        return self.adapter

    def prepare_save(self, buffer_bytes: int | None = None) -> None:
        """See `Engine.prepare_save`. Without a save to follow, the memory is held until `close`."""
        self._refuse_closed()
        self._checkpoints.prepare_save(buffer_bytes)

    def wait_saved(self) -> None:
        """See `Engine.wait_saved`."""
        self._refuse_closed()
        self._checkpoints.wait_saved()

    def cancel_save(self) -> None:
        """See `Engine.cancel_save`."""
        self._checkpoints.cancel_save()

    def load(self, folder: str | Path, *, wait: bool = True, convert_states: bool = False) -> dict[str, Any]:
        """See `Engine.load`.

        With `wait=False` it returns when the units on the device are read; the others stream in while the first forward runs, see
        [Note: lazy reading] in checkpoint/reader.py. A damaged tensor is then found by the step that needs it. If a load fails
        before anything was restored, the engine is as before; otherwise it refuses to compute until a load succeeds.
        """
        super()._refuse_closed()  # a failed load is no obstacle
        refuse_other_config(Path(folder), self.config)
        self._checkpoints.wait_saved()
        self._optimizer.forget(self._checkpoints.cancel_load())
        self.synchronize()
        loading, state = self._host_checkpoints.start_load(Path(folder), convert_states)
        self._checkpoints.follow_load(loading)
        if not self._warm:  # made without weights
            self._warm_up()
        self._optimizer.expect(loading.futures)
        self._device_side.weights.drop_all()
        self.step, self.updates, self.seed = state["step"], state["updates"], state["seed"]
        if self._loss_scale and state.get("loss_scale"):
            self._loss_scale = LossScale.from_state_dict(state["loss_scale"])
        loading.wait(None if wait else [name for name, planes in self.store.units.items() if planes.resident])
        self._streams.synchronize()
        self._oom.restore(state.get("ladder") or {})
        return state["extra"]

    def synchronize(self) -> None:
        """See `Engine.synchronize`."""
        self._optimizer.wait_all()
        self._streams.synchronize()

    def counters(self) -> dict[str, int | float | str]:
        """`weight_bytes` and `gradient_bytes` copied for the latest step, `updates_running` in the background, `fetches_left` of
        the step in progress; `weight_slots`, `compiled_layers`, and the gradients' `route`."""
        running = sum(not job.done() for job in self._optimizer.pending().values())
        return {**self._device_side.counters(), "updates_running": running}

    def memory(self) -> dict[str, int]:
        """Bytes: `host_<plane>`, `host_slabs`, `host_pinned`, `device_resident`, `device_slots`, `device_gradients`,
        `device_peak`."""
        return self._device_side.memory()

    def close(self) -> None:
        """See `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        self._checkpoints.close()
        self._streams.synchronize()
        self._optimizer.close()
        self._device_side.close()
        self.store.close()
        self._shards.close()

    # ---------------------------------------------------------------- small parts

    def _checked(
        self, batch: Batch, training: bool = True, objective: Objective | None = None
    ) -> tuple[dict[str, torch.Tensor], StepTotals, int]:
        checked, step, together = super()._checked(batch, training, objective)
        if self._unverified_packing is not None and batches.is_packed(checked):
            attention, trust_remote_code = self._unverified_packing
            verify_packing(self.config, attn_implementation=attention, trust_remote_code=trust_remote_code)
            self._unverified_packing = None
        return self._share_of_rank(checked, together), step, together

    def _share_of_rank(self, batch: dict[str, torch.Tensor], together: int = 1) -> dict[str, torch.Tensor]:
        """The rows that this rank computes."""
        if not self._shards.many:
            return batch
        return batches.rows_of_rank(batch, self._shards.rank, self._shards.world, together)

    def _metric_names(self, sums: LossSums) -> list[str] | None:
        """Names of the metrics that some rank has: one without targets may have none. Cross entropy has none anywhere."""
        return None if type(self.objective) is CrossEntropy else self._shards.names(sums.metrics)

    def _whole(self, planes: UnitPlanes) -> UnitPlanes:
        """A unit's masters; on several ranks gathered on the CPU, which is collective."""
        if not self._shards.many:
            return planes
        lo = {} if planes.lo is None else {"lo": self._whole_plane(planes.lo, planes)}
        return UnitPlanes.of(planes.name, planes.layout, {"hi": self._shards.whole(planes.hi), **lo})

    def _whole_plane(self, plane: torch.Tensor, planes: UnitPlanes) -> torch.Tensor:
        """The plane of a whole unit, with zeros for its frozen elements."""
        missing = planes.numel - plane.numel()
        return self._shards.whole(torch.nn.functional.pad(plane, (0, missing)) if missing else plane)

    @contextmanager
    def _kernels(self, batch: Batch) -> Iterator[None]:
        """Choose the kernels of a step on this batch: the fastest, or the fastest that are deterministic."""
        if self.plan.deterministic:
            with deterministic_kernels():
                yield
        else:
            with fastest_attention(self._attention_order(batch)):
                yield

    def _attention_order(self, batch: Batch) -> tuple[SDPBackend, ...]:
        """Attention kernels to try for rows of this length, fastest first."""
        shape, tokens = attention_shape(self.config.get_text_config()), batch["input_ids"].shape[1]
        return attention_order(shape, tokens, self.plan.compute, self.device)

    def _result(
        self,
        batch: Batch,
        tokens: int,
        loss: float,
        norm: float,
        metrics: dict[str, float],
        routing: dict[str, float],
        skipped: str | None,
        started: float,
    ) -> StepResult:
        """The result of the step that has just been computed on `batch`."""
        seconds, moved = self._device_side.seconds(), self._device_side.moved_bytes()
        seconds["step"] = time.perf_counter() - started
        policy = self.plan.summary(self._oom.shape(batch["input_ids"].shape))
        pipeline = self.instruments.record(self._device_side, policy, self._oom.changes)
        phases = sum(seconds.get(phase, 0.0) for phase in ("forward", "head", "backward"))
        self._own_work_s = max(0.0, phases - sum(pipeline.waited_s.values())) if pipeline else None
        scale = self._gradient_scale
        return StepResult(loss, norm, tokens, skipped, seconds, scale, moved, pipeline, metrics, routing)

    def _rearrange(self, plan: ExecutionPlan) -> None:
        """Remake the device buffers for another plan; see `DeviceBuffers.rearrange`. No step is in progress."""
        self.wait_saved()  # a writer reads the planes where they lie
        self.synchronize()
        try:
            self._device_side.rearrange(plan)
        except BaseException:  # without buffers the engine cannot compute
            self._closed = True
            self._optimizer.close()
            self.store.close()
            raise

    def _refuse_closed(self) -> None:
        """Raise, too, if the planes hold no consistent state."""
        super()._refuse_closed()
        self._checkpoints.refuse_mixture()


def parity_engine(model: nn.Module) -> HostEngine:
    """The engine that a parity check compares with plain Hugging Face: fp32 on the CPU, rows cut into microbatches."""
    return HostEngine(
        model, ExecutionPlan(compute_dtype="fp32", microbatch_rows=2, threads=1), device="cpu", verify="never"
    )

"""`MeshEngine`: a Hugging Face model trained by many processes, behind the same interface as the host engine.

Every rank makes an engine with the same arguments and calls the same methods with the same batch, the batch of the whole step.
Every rank gets the same results.

Order of construction: check the layout -> cut -> tensor parallel -> recompute -> materialise and shard, layer by layer -> load.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatrain.checkpoint.async_save import SaveHandle, SaveProgress
from megatrain.checkpoint.manager import CheckpointManager, SaveOptions
from megatrain.checkpoint.reader import OpenCheckpoint, load_masters
from megatrain.device.allocator import configure_allocator
from megatrain.device.attention import attention_order, deterministic_kernels, fastest_attention
from megatrain.device.compiler import start_workers
from megatrain.engine.base import (
    Engine,
    EvalResult,
    StepResult,
    build_model,
    check_learning_rate,
    config_of,
    refuse_unmatched_groups,
    skip_reason,
)
from megatrain.engine.mesh import context_parallel, launch
from megatrain.engine.mesh.context_parallel import TokenMap
from megatrain.engine.mesh.data_parallel import BF16_POLICY, MASTERS_POLICY, Box, Devices, local, modules_in_fp32, shard
from megatrain.engine.mesh.gradients import Gradients
from megatrain.engine.mesh.layout import MeshPlan, whole_attention
from megatrain.engine.mesh.pipeline import Batch, Runner, microbatches, refuse_mask
from megatrain.engine.mesh.rank_metrics import RankMeter
from megatrain.engine.mesh.saving import MeshCheckpoints
from megatrain.engine.mesh.stage import Part, Stage, cut, plan_parts, verify_family_cut
from megatrain.engine.mesh.state import MeshState, everyone
from megatrain.engine.mesh.tensor_parallel import parallelize, splits_experts
from megatrain.engine.mesh.zero_bubble import WeightGradStore
from megatrain.engine.objective import CrossEntropy, Objective, StepTotals
from megatrain.errors import Aftermath, UserError
from megatrain.metrics.record import MeshRecord
from megatrain.models import routers
from megatrain.models.build import dropout_keys, find_model_folder, refuse_other_config
from megatrain.models.conversion import unit_of_names
from megatrain.models.structure import attention_shape, dissect, fp32_parameter_names, persistent_buffers
from megatrain.models.templates import LayerCode, template_groups
from megatrain.models.weights import copy_from_memory, initialize
from megatrain.optim.spec import OptimizerSpec

logger = logging.getLogger(__name__)

MASTERS = {"bf16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}
COMPUTE = {**MASTERS, "bf16": torch.bfloat16}


class MeshEngine(Engine):
    """Trains a Hugging Face causal language model whose state is sharded over the processes of a mesh.

    Args:
        model: A folder (or cached hub id) with config.json and safetensors, or an in-memory CausalLM, the same on every rank,
            which is copied.
        plan: How the model is spread and run. `layout.shard` is filled in from the number of processes.
        device: This rank's device.
        optim: The optimizer; by default AdamW.
        objective: The loss: `CrossEntropy`, the default.
        seed: Seed of initialisation and dropout.
        init: `random` initialises from the config alone, by Hugging Face's own rules; `empty` leaves the weights to `load`.
        trust_remote_code: Whether code in the model folder may run.
        sample_every_steps: On GPUs, profile every N-th step for communication overlap and stragglers; None: never.
        debug: Makes a context manager inside which everything is computed, recomputation included. For tests.

    Attributes:
        plan: As given, with `auto` and `shard` resolved; `layout` is its layout.
        parts: The layers of each stage; `stages` are those on this rank.

    Raises:
        UserError: The layout or the family cannot run; raised before any process group is made.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        plan: MeshPlan,
        *,
        device: str | torch.device = "auto",
        optim: OptimizerSpec | None = None,
        objective: Objective | None = None,
        seed: int = 0,
        init: Literal["random", "empty"] | None = None,
        trust_remote_code: bool = False,
        router_loss: bool | float | None = None,
        router_bias_speed: float | None = None,
        sample_every_steps: int | None = None,
        debug: Callable[[], AbstractContextManager[Any]] | None = None,
    ):
        super().__init__(optim, objective, seed)
        if type(self.objective) is not CrossEntropy:
            what = f"the mesh engine computes cross entropy only, not {self.objective.name}"
            raise UserError(what, "objective", "use HostEngine")
        self.device = launch.device_of_rank(device)
        configure_allocator(self.device)
        self._debug = debug
        self._stepped = False
        config = config_of(model, trust_remote_code)
        self.source_folder: Path | None = None if isinstance(model, nn.Module) else find_model_folder(model)
        self.layout = plan.layout.checked(config, launch.world_size())
        dtype = plan.compute_dtype
        if dtype == "auto":
            dtype = "bf16" if self.device.type == "cuda" else "fp32"
        self.plan = dataclasses.replace(plan, layout=self.layout, compute_dtype=dtype)
        self._master_dtype, self._compute_dtype = MASTERS[dtype], COMPUTE[dtype]
        meta = self._build(model, config, trust_remote_code)
        if router_bias_speed is not None:
            raise UserError("the mesh engine does not update correction biases", routers.BIAS_KEY, "use engine: host")
        if routers.router_loss(meta, router_loss) is not None:
            what = "the mesh engine does not compute the auxiliary loss of the routers"
            raise UserError(what, routers.KEY, f"set {routers.KEY}: false to train without it, or use engine: host")
        self._fp32_names: set[str] = set()
        if dtype == "bf16":
            # Known only of a model that is built in bf16.
            built = build_model(model, config, torch.bfloat16, trust_remote_code, plan.attn_implementation)
            self._fp32_names = fp32_parameter_names(built, torch.bfloat16)
        self.structure = dissect(meta)
        self._check_model(meta)
        self._deterministic = plan.deterministic
        self.compiled = plan.compile == "on" or (plan.compile == "auto" and self.device.type == "cuda")
        if self.compiled and (reason := self._eager_reason(meta)):
            self.compiled = False
            logger.info("layers run eager: %s", reason)
        if self.compiled:
            start_workers()
            self._shapes = (plan.train_shape, plan.eval_shape)
        self.config = meta.config
        refuse_unmatched_groups(self.structure, self.optim)
        if self.layout.pipeline > 1:
            verify_family_cut(meta.config, trust_remote_code)

        launch.join(self.device)
        self.devices = Devices.build(self.layout, self.device)
        self.parts = plan_parts(self.structure, self.layout)
        self.stages: list[Stage] = []
        boxes = []
        for index in self.layout.stages_of(self.devices.at.pipeline):
            stage, stage_boxes = self._make_stage(meta, self.parts[index])
            self.stages.append(stage)
            boxes.append(stage_boxes)
        self.gradients = Gradients(
            self.stages, boxes, self.structure.tied, self.devices, self.optim, self.structure.undecayed
        )
        self.state = MeshState(self.structure, self.gradients, self.devices)
        self._buffers = persistent_buffers(meta)
        self.checkpoint_policy = MeshCheckpoints(
            self.structure, self.state, self.optim, self._buffers, self.source_folder, self.devices, self.shipped
        )
        self._checkpoints = CheckpointManager(self.checkpoint_policy)
        self._fill(model, init)
        hidden_size = self.config.get_text_config().hidden_size
        self.runner = Runner(self.stages, self.devices, (hidden_size, self._compute_dtype))
        stage_layers = [len(part.layers) for part in self.parts]
        self._meter = RankMeter(self.layout, stage_layers, self.runner, self.device, sample_every_steps)

    def train_step(self, batch: Mapping[str, torch.Tensor], learning_rate: float | None = None) -> StepResult:
        """See `Engine.train_step`. Collective: the same batch, and the same result, on every rank."""
        started = time.perf_counter()
        check_learning_rate(learning_rate)
        first, self._stepped = not self._stepped, True
        self._meter.begin_step()
        with self.watch("first_step" if first else "step", f"step {self.step + 1}"):
            self._checkpoints.check_save()
            result = self.backward(batch)
            self.step += 1
            if result.tokens == 0:
                return result
            assert result.loss is not None and result.grad_norm is not None
            skipped = skip_reason(result.loss, result.grad_norm)
            with self.watch("update"):
                if skipped is None:
                    self.updates += 1
                    rate = self.optim.learning_rate if learning_rate is None else learning_rate
                    self.gradients.update(result.grad_norm, rate)
                self.gradients.clear()
        self._meter.end_step()
        seconds = {**result.seconds, "step": time.perf_counter() - started}
        return StepResult(result.loss, result.grad_norm, result.tokens, skipped, seconds)

    def step_over_ranks(self) -> MeshRecord | None:
        """See `Engine.step_over_ranks`; None at the steps that are left out. Collective."""
        with self.watch("step", "figures of all ranks"):
            return self._meter.gather()

    def backward(self, batch: Mapping[str, torch.Tensor]) -> StepResult:
        """See `Engine.backward`. Collective."""
        started = time.perf_counter()
        batch, step, _ = self._checked(batch)
        if (tokens := step.counts["tokens"]) == 0:
            return StepResult(None, None, 0, "no target tokens", {"step": time.perf_counter() - started})
        self.gradients.clear()
        own = microbatches(batch, self.layout, self.devices.at, self.device)
        for stage in self.stages:
            stage.train()
            stage.loss_divisor = float(tokens)
        with self._computing(own), self._seeded(), self.watch("forward and backward"):
            local_loss = self.runner.forward_backward(own)
        with self.watch("norm of all ranks"):
            loss, norm = self.gradients.finish(local_loss)
        return StepResult(loss, norm, tokens, "gradients only", {"step": time.perf_counter() - started})

    def eval_step(self, batch: Mapping[str, torch.Tensor]) -> EvalResult:
        """See `Engine.eval_step`. Collective."""
        batch, step, _ = self._checked(batch, training=False)
        if (tokens := step.counts["tokens"]) == 0:
            return EvalResult(0.0, 0)
        own = microbatches(batch, self.layout, self.devices.at, self.device)
        for stage in self.stages:
            stage.eval()
            stage.loss_divisor = 1.0
        with self.watch("evaluation"):
            with self._computing(own):
                loss_sum = self.runner.evaluate(own)
            if self.devices.at.tensor > 0:
                loss_sum.zero_()
            dist.all_reduce(loss_sum)
        return EvalResult(loss_sum.item(), tokens, {}, step.counts)

    def sequence_logprobs(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See `Engine.sequence_logprobs`."""
        raise UserError(
            "the mesh engine computes no log-probabilities of sequences", "engine: mesh", "use engine: host"
        )

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Engine.named_parameters`. Collective: exhaust it on every rank."""
        self._refuse_closed()
        yield from self._gathered(lambda parameter: parameter.detach())

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Engine.named_gradients`; zeros for frozen parameters. Collective: exhaust it on every rank."""
        self._refuse_closed()

        def gradient(parameter: torch.Tensor) -> torch.Tensor:
            if not parameter.requires_grad:
                return torch.zeros_like(parameter)
            assert parameter.grad is not None, "call backward first"
            return parameter.grad

        yield from self._gathered(gradient)

    def _gathered(self, read: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Every rank writes its box into zeros, unless another rank holds the same box, and the sum over ranks is the whole."""
        owned, at = self.gradients.owned(), self.devices.at
        for unit in self.structure.units:
            for _, name in unit.full_names():
                whole = torch.zeros(self._shape(name), dtype=self._master_dtype, device=self.device)
                if name in owned and at.replicate == 0:
                    parameter, box = owned[name]
                    if box.tensor_dim is not None or at.tensor == 0:
                        whole[box.slices] = local(read(parameter)).reshape(box.sizes)
                dist.all_reduce(whole)
                yield name, whole.cpu()

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
        """See `Engine.save`. Collective. The format is the host engine's, which resumes from it, as does any layout.

        One rank of each host writes, with at most two gathered units in memory. See [Note: a mesh save].

        Args:
            buffer_bytes: Host memory of this rank for copies; None: half of what is available, shared with the host's ranks.
            then: Called on every rank, in the save's thread.

        Raises:
            UserError: As for `Engine.save`; with the reason on the rank that failed, with that rank's number on the others.
        """
        self._refuse_closed()
        if self._master_dtype == torch.float64:
            raise UserError("fp64 is for tests: checkpoints hold fp32", "MeshEngine.save", "use compute_dtype fp32")
        state: dict[str, Any] = {"step": self.step, "updates": self.updates, "seed": self.seed, "loss_scale": None}
        state["extra"] = extra or {}
        with self.watch("save"):
            options = SaveOptions(background, weights_only, on_error, buffer_bytes, then)
            return self._checkpoints.save(Path(folder), state, options)

    def wait_saved(self) -> None:
        """See `Engine.wait_saved`. Collective."""
        with self.watch("save", "wait for the save"):
            self._checkpoints.wait_saved()

    def cancel_save(self) -> None:
        """See `Engine.cancel_save`. Not collective: for a rank that must exit."""
        self._checkpoints.cancel_save()

    def load(self, folder: str | Path, *, wait: bool = True, convert_states: bool = False) -> dict[str, Any]:
        """See `Engine.load`; from a checkpoint of either engine and any layout. Everything is loaded on return. Collective.

        Each rank reads only its own parts of the tensors and verifies a share of the checkpoint, so that all ranks together read
        it twice, whatever their number. Units that the family saves in another form than it computes with are read whole.
        """
        super()._refuse_closed()  # an earlier failed load is no obstacle
        refuse_other_config(Path(folder), self.config)
        self.wait_saved()
        with self.watch("load"), self._checkpoints.restoring(Path(folder)):
            return self._load(Path(folder), convert_states)

    def _load(self, folder: Path, convert_states: bool) -> dict[str, Any]:
        state: dict[str, Any] | None = None
        try:
            with OpenCheckpoint(folder, self.structure, self.optim, convert_states) as opened:
                for unit in self.structure.units:
                    found = opened.boxes(unit, self.state.boxes(unit.name))
                    if found is not None:
                        self.state.write_boxes(found)
                    elif unit.name in self.state.local_units:
                        opened.restore(unit, self.state, self._buffers)  # type: ignore[arg-type]
                opened.verify_share(dist.get_rank(), dist.get_world_size())
                state = opened.state
        finally:
            complete = everyone(state is not None, self.device)
        if not complete or state is None:
            raise Aftermath("another rank could not read the checkpoint", str(folder), "see that rank's error")
        self.step, self.updates, self.seed = state["step"], state["updates"], state["seed"]
        self.state.set_updates(self.updates)
        self._share_buffers()
        self._copy_buffers()
        return state["extra"]

    def _refuse_closed(self) -> None:
        """Raise also after a failed load, when the ranks hold no consistent state."""
        super()._refuse_closed()
        self._checkpoints.refuse_mixture()

    def memory(self) -> dict[str, int]:
        """Bytes on this rank: `device_state` (masters, moments), `device_peak`."""
        held = [local(p) for _, p, _, _ in self.gradients.all()]
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        planes = 1 + len(self.optim.states)
        return {"device_state": planes * sum(t.numel() * t.element_size() for t in held), "device_peak": peak}

    def counters(self) -> dict[str, int | float | str]:
        """`schedules`: microbatch shapes whose receive buffers are kept."""
        return {"schedules": self.runner.kept_schedules}

    def _fill(self, model: str | Path | nn.Module, init: str | None) -> None:
        """Fill masters and persistent buffers from memory, by initialisation, or from the folder's files."""
        if isinstance(model, nn.Module):
            copy_from_memory(model, self.structure, self.state)  # type: ignore[arg-type]
        elif init == "empty":
            for unit in self.structure.units:
                for _, name in unit.full_names():
                    self.state.write(name, torch.zeros(()).expand(self._shape(name)))
        elif init == "random":
            initialize(self.structure, self.state, seed=self.seed, device=self.device)  # type: ignore[arg-type]
        else:
            assert self.source_folder is not None
            load_masters(self.source_folder, self.structure, self.state, self._buffers)  # type: ignore[arg-type]
        self._copy_buffers()

    def _share_buffers(self) -> None:
        """Send the buffers that each unit's holder has read to all ranks: any of them may write the unit."""
        of_holder: dict[int, list[str]] = {}
        for name, unit in unit_of_names(self.structure).items():
            if name in self._buffers and (holder := self.state.holder(unit)) is not None:
                of_holder.setdefault(holder, []).append(name)
        for holder, names in of_holder.items():
            sent = [{name: self._buffers[name] for name in names}]
            dist.broadcast_object_list(sent, src=holder, group=self.devices.save_group)
            for name, value in sent[0].items():
                self._buffers[name].copy_(value)

    def _copy_buffers(self) -> None:
        """Copy the model's persistent buffers (a router's correction bias) into the stages."""
        for stage in self.stages:
            for name, buffer in stage.model.named_buffers():
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])

    def close(self) -> None:
        """See `Engine.close`. Process groups stay the caller's."""
        with self.watch("save", "wait for the last save"):
            self._checkpoints.close()
        self._closed = True
        self.stages.clear()

    def _build(self, model: Any, config: Any, trust_remote_code: bool) -> Any:
        """The whole model on meta, in the masters' dtype even where the family's code asks for fp32."""
        meta = build_model(model, config, self._master_dtype, trust_remote_code, self.plan.attn_implementation)
        for parameter in meta.parameters():
            parameter.data = parameter.data.to(self._master_dtype)
        if self.layout.context > 1 and not getattr(meta, "_supports_attention_backend", False):
            what = f"{type(meta).__name__}'s attention cannot be replaced, which context parallel needs"
            raise UserError(what, "parallel.context", "set it to 1")
        if self.layout.context > 1:
            meta.set_attn_implementation(context_parallel.NAME)
        return meta

    def _check_model(self, meta: Any) -> None:
        layout = self.layout
        for index, layer in enumerate(meta.get_submodule(self.structure.layers_name)):
            modules_in_fp32(layer, self._fp32_names, f"{self.structure.layers_name}.{index}")
        edges = {name for unit in (self.structure.embedding, self.structure.head) for _, name in unit.full_names()}
        if kept := sorted(edges & self._fp32_names):
            what = f"{kept[0]} must stay in fp32, which bf16 compute does not support here"
            raise UserError(what, "precision.compute_dtype", "use fp32")
        if layout.splits_backward and dropout_keys(meta.config.get_text_config()):
            what = f"dropout with schedule {layout.schedule} is not supported"
            raise UserError(what, "parallel.schedule", "use 1f1b or interleaved")
        if whole_attention(meta.config, layout.tensor):
            logger.warning("heads do not divide over %d tensor ranks: each computes the whole attention", layout.tensor)

    def _eager_reason(self, meta: nn.Module) -> str | None:
        """Why the layers cannot be compiled; None if they can."""
        layout = self.layout
        if layout.context > 1:
            return "context parallel exchanges keys and values with collectives that are not compiled"
        if layout.tensor > 1 and splits_experts(meta):
            return "the experts of a tensor rank see a different number of tokens each time"
        if layout.splits_backward:
            return f"schedule {layout.schedule} defers weight gradients, which compiled layers cannot"
        return "fp64 is for tests" if self._master_dtype == torch.float64 else None

    def _compile_layers(self, layers: Sequence[nn.Module]) -> None:
        """Let equal layers run one compiled function on their own weights. See [Note: template groups] in templates.py.

        The function's module is a copy on meta, made before FSDP hooks the layer: the hooks stay outside.
        """
        codes: dict[int, LayerCode] = {}
        for layer, group in zip(layers, template_groups(layers), strict=True):
            if group not in codes:
                codes[group] = LayerCode(copy.deepcopy(layer), f"layer_{group}", compiled=True)
            layer.forward = functools.partial(_run_code, codes[group], layer)

    def _make_stage(self, meta: nn.Module, part: Part) -> tuple[Stage, dict[str, Box]]:
        layout = self.layout
        stage = Stage(cut(meta, self.structure, part), self.structure, part, layout.tensor)
        if layout.tensor > 1:
            parallelize(stage, self.structure, self.devices.mesh["tensor"])
        if self.devices.context_group is not None:
            stage.token_map = functools.partial(TokenMap.of, self.devices.context_group, self.device)
        if layout.splits_backward:
            stage.weight_grads = WeightGradStore()
            for layer in stage.own_layers():
                stage.weight_grads.install(layer)
        if (debug := self._debug) is not None:
            # One for the forward, one for the recompute: inside `backward` the caller's torch function modes are off.
            stage.checkpoint_kwargs["context_fn"] = lambda: (debug(), debug())
        if self.compiled:
            self._compile_layers(stage.own_layers())
            stage.head.compile()
        if self.plan.recompute:
            for layer in stage.own_layers():
                forward = functools.partial(checkpoint, layer.forward, **stage.checkpoint_kwargs)
                layer.forward = forward  # type: ignore[method-assign]
        policy = BF16_POLICY if self._compute_dtype == torch.bfloat16 else MASTERS_POLICY
        boxes = shard(stage, self.devices, policy, layout.pipeline > 1, self._fp32_names)
        if not part.first or layout.tensor > 1:
            stage.hook_entry()
        return stage, boxes

    def _shape(self, name: str) -> torch.Size:
        return self.structure.model.get_parameter(name).shape

    def _checked(
        self, batch: Mapping[str, torch.Tensor], training: bool = True, objective: Objective | None = None
    ) -> tuple[Batch, StepTotals, int]:
        checked, step, together = super()._checked(batch, training, objective)
        refuse_mask(checked)
        return checked, step, together

    @contextlib.contextmanager
    def _computing(self, own: Sequence[Batch]) -> Iterator[None]:
        """The context of a forward: `debug`, and deterministic kernels, or the fastest attention for the heads of a rank.

        Context parallel has a mask, and leaves the choice of the kernel to torch.
        """
        shape, layout = attention_shape(self.config.get_text_config()), self.layout
        if layout.context > 1:
            shape = None
        elif shape is not None and not whole_attention(self.config, layout.tensor):
            shape = shape[0] // layout.tensor, shape[1] // layout.tensor, shape[2]
        tokens = own[0]["input_ids"].shape[1]
        if self._deterministic:
            kernels = deterministic_kernels()
        else:
            kernels = fastest_attention(attention_order(shape, tokens, self._compute_dtype, self.device))
        with self._debug() if self._debug is not None else contextlib.nullcontext(), kernels:
            yield

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """Dropout of this step on this rank: a function of seed, step and the rank's rows and layers."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            at = self.devices.at
            torch.manual_seed(hash((self.seed, self.step, at.pipeline, at.replicate, at.shard)) & (2**63 - 1))
            yield


def _run_code(code: LayerCode, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A layer's forward, while FSDP has gathered its weights."""
    return code("keep", {**dict(layer.named_parameters()), **dict(layer.named_buffers())}, args, kwargs)

"""`MeshEngine`: a Hugging Face model trained by many processes, with the host engine's surface.

Every rank makes an engine with the same arguments and calls the same methods with the same batch, which is the batch of the
whole step. Every rank gets the same results.

Order of construction: check the layout -> cut -> tensor parallel -> recompute -> materialise and shard, layer by layer -> load.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from megatrain.checkpoint.async_save import SaveProgress
from megatrain.checkpoint.manager import SaveOptions
from megatrain.checkpoint.reader import OpenCheckpoint
from megatrain.device.attention import attention_order, fastest_attention
from megatrain.engine.base import Engine, check_learning_rate, skip_reason
from megatrain.engine.host.assembly import build_model, config_of, refuse_unmatched_groups
from megatrain.engine.mesh import context_parallel as context
from megatrain.engine.mesh import exact, launch
from megatrain.engine.mesh.context_parallel import TokenMap, zigzag_order
from megatrain.engine.mesh.data_parallel import local, modules_in_fp32, shard
from megatrain.engine.mesh.devices import Devices
from megatrain.engine.mesh.gradients import Gradients
from megatrain.engine.mesh.layout import Layout, dropout_keys, split_layers, whole_attention
from megatrain.engine.mesh.microbatches import Batch, microbatches, without_mask
from megatrain.engine.mesh.pipeline import Microbatches, Runner
from megatrain.engine.mesh.saving import MeshCheckpointManager, MeshSave
from megatrain.engine.mesh.stage import Part, Stage, cut
from megatrain.engine.mesh.stage_check import verify_family_cut
from megatrain.engine.mesh.state import MeshState, everyone
from megatrain.engine.mesh.tensor_parallel import parallelize, splits_experts
from megatrain.engine.mesh.watchdog import unwatched
from megatrain.engine.mesh.zero_bubble import Deferred
from megatrain.engine.results import EvalResult, StepResult
from megatrain.errors import Aftermath, UserError
from megatrain.models.build import find_model_folder, fp32_parameter_names, refuse_other_config
from megatrain.models.conversion import unit_of_names
from megatrain.models.init import initialize
from megatrain.models.structure import Structure, attention_shape, dissect, persistent_buffers
from megatrain.models.templates import LayerCode, template_groups
from megatrain.models.weights import load_weights
from megatrain.optim.spec import OptimizerSpec

logger = logging.getLogger(__name__)

ComputeDtype = Literal["bf16", "fp32", "fp64"]
MASTERS = {"bf16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}
COMPUTE = {**MASTERS, "bf16": torch.bfloat16}


class MeshEngine(Engine):
    """Trains a Hugging Face causal language model whose state is sharded over the processes of a mesh.

    Args:
        model: A folder (or cached hub id) with config.json and safetensors, or an in-memory CausalLM, the same on every
            rank, which is copied.
        layout: How it is spread. `shard` is filled in from the number of processes.
        device: Of this rank.
        optim: The optimizer; by default AdamW.
        compute_dtype: bf16 with fp32 masters, moments and reductions; fp32; or fp64, for tests: then every cast to fp32 in
            the model's code is one to fp64.
        recompute: Keep only the input of each layer and compute the layer again in the backward.
        compile: `auto` compiles the layers on a GPU, `on` everywhere, `off` never. Layers of context ranks, mixtures of tensor
            ranks, and layers of schedules that split the backward, run eager.
        init: `random` initialises from the config alone, by HF's own rules, seeded; `empty` leaves the weights to `load`.
        seed: Of initialisation and dropout.
        trust_remote_code: Whether code in the model folder may run.
        attn_implementation: HF's name of an attention implementation; context parallel brings its own.

    Raises:
        UserError: The layout or the family cannot run; said before any process group is made.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        layout: Layout,
        *,
        device: str | torch.device = "auto",
        optim: OptimizerSpec | None = None,
        compute_dtype: ComputeDtype | Literal["auto"] = "auto",
        recompute: bool = False,
        compile: Literal["auto", "on", "off"] = "auto",
        init: Literal["random", "empty"] | None = None,
        seed: int = 0,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
    ):
        super().__init__(optim, seed)
        self.device = launch.device_of_rank(device)
        if compute_dtype == "auto":
            compute_dtype = "bf16" if self.device.type == "cuda" else "fp32"
        self.watch: Callable[..., contextlib.AbstractContextManager[Any]] = unwatched
        """(kind, name): what the engine is doing, for a watchdog."""
        self._stepped = False
        self._mixture: Path | None = None
        """The checkpoint whose load has failed, so that what the ranks hold is part old and part new."""
        self._compute = compute_dtype
        config = config_of(model, trust_remote_code)
        self.source_folder: Path | None = None if isinstance(model, nn.Module) else find_model_folder(model)
        self.layout = layout.checked(config, launch.world_size())
        meta = self._build(model, config, trust_remote_code, attn_implementation)
        self._in_fp32: set[str] = set()
        if compute_dtype == "bf16":
            # Known only of a model that is built for the type.
            built = build_model(model, config, torch.bfloat16, trust_remote_code, attn_implementation)
            self._in_fp32 = fp32_parameter_names(built, torch.bfloat16)
        self.structure = dissect(meta)
        self._check_model(meta)
        self.compiled = compile == "on" or (compile == "auto" and self.device.type == "cuda")
        """Whether layers are compiled."""
        if self.compiled and (eager := self._why_eager(meta)):
            self.compiled = False
            logger.info("layers run eager: %s", eager)
        self.config = meta.config
        refuse_unmatched_groups(self.structure, self.optim)
        if self.layout.pipeline > 1:
            verify_family_cut(meta.config, trust_remote_code)

        launch.join(self.device)
        self.devices = Devices.build(self.layout, self.device)
        self.parts = plan_parts(self.structure, self.layout)
        self.stages: list[Stage] = []
        self.boxes = []
        for index in self.layout.stages_of(self.devices.at.pipeline):
            stage, boxes = self._make_stage(meta, self.parts[index], recompute)
            self.stages.append(stage)
            self.boxes.append(boxes)
        self.gradients = Gradients(self.stages, self.boxes, self.structure.tied, self.devices, self.optim)
        self.state = MeshState(self.structure, self.gradients, self.devices)
        self._buffers = persistent_buffers(meta)
        self._desk = MeshCheckpointManager(
            self.structure, self.state, self.optim, self._buffers, self.source_folder, self.devices
        )
        self._fill(model, init)
        hidden = self.config.get_text_config().hidden_size
        self.runner = Runner(self.stages, self.devices, (hidden, COMPUTE[compute_dtype]))

    # ---------------------------------------------------------------- training

    def train_step(self, batch: Batch, learning_rate: float | None = None) -> StepResult:
        """One optimizer step on all rows of `batch`. Collective; the same result on every rank.

        Args:
            batch: The batch of the whole step, the same on every rank: CPU int64 tensors `input_ids`, `labels` (rows, T),
                -100 = no target, unshifted; optionally `position_ids`, `document_ids`, `attention_mask` (rows, T).
            learning_rate: Of this step; by default the optimizer's.
        """
        started = time.perf_counter()
        check_learning_rate(learning_rate)
        first, self._stepped = not self._stepped, True
        with self.watch("first_step" if first else "step", f"step {self.step + 1}"):
            self._desk.look()
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
        seconds = {**result.seconds, "step": time.perf_counter() - started}
        return StepResult(result.loss, result.grad_norm, result.tokens, skipped, seconds)

    def backward(self, batch: Batch) -> StepResult:
        """Gradients of a step, without an update; read them with `named_gradients`."""
        started = time.perf_counter()
        batch, tokens = self._checked(batch)
        if tokens == 0:
            return StepResult(None, None, 0, "no target tokens", {"step": time.perf_counter() - started})
        self.gradients.clear()
        pieces = microbatches(batch, self.layout, self.devices.at, self.device)
        for stage in self.stages:
            stage.train()
            stage.loss_divisor = float(tokens)
        with self._exact(), self._seeded(), self._fastest_attention(pieces), self.watch("forward and backward"):
            loss = self.runner.forward_backward(pieces)
        with self.watch("norm of all ranks"):
            found = self.gradients.finish(loss)
        return StepResult(found.loss, found.norm, tokens, "gradients only", {"step": time.perf_counter() - started})

    def eval_step(self, batch: Batch) -> EvalResult:
        """Loss of a batch in evaluation mode. Collective. Changes nothing, also not what later training steps compute."""
        batch, tokens = self._checked(batch)
        if tokens == 0:
            return EvalResult(0.0, 0)
        pieces = microbatches(batch, self.layout, self.devices.at, self.device)
        for stage in self.stages:
            stage.eval()
            stage.loss_divisor = 1.0
        with self.watch("evaluation"):
            with self._exact(), self._fastest_attention(pieces):
                loss_sum = self.runner.evaluate(pieces)
            if self.devices.at.tensor > 0:
                loss_sum.zero_()
            dist.all_reduce(loss_sum)
        return EvalResult(loss_sum.item(), tokens)

    # ---------------------------------------------------------------- state

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole master on the CPU) of every parameter, tied ones once. Collective: exhaust it on every rank."""
        self._refuse_closed()
        yield from self._gathered(lambda parameter: parameter.detach())

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, whole gradient on the CPU) after `backward`, before clipping. Collective: exhaust it on every rank.

        Frozen parameters have zeros.
        """
        self._refuse_closed()

        def gradient(parameter: torch.Tensor) -> torch.Tensor:
            if not parameter.requires_grad:
                return torch.zeros_like(parameter)
            assert parameter.grad is not None, "call backward first"
            return parameter.grad

        yield from self._gathered(gradient)

    def _gathered(self, read: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Every rank lays its box into zeros, unless another rank holds the same, and all of them are added."""
        owned = self.gradients.owned()
        at = self.devices.at
        for unit in self.structure.units:
            for _, name in unit.full_names():
                whole = torch.zeros(_shape(self.structure, name), dtype=MASTERS[self._compute], device=self.device)
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
    ) -> MeshSave:
        """Write a checkpoint in the host engine's format, behind the one that may still be written. Collective.

        `from_pretrained` loads it, the host engine goes on from it, and so does any layout of this engine. One rank of each host
        writes, with two gathered units in memory at most. See [Note: a mesh save].

        Args:
            folder: A folder that does not exist yet.
            extra: JSON data to keep with it, returned by `load`.
            background: Return as soon as training may continue, instead of when it is on the disk.
            weights_only: bf16 weights without training state.
            on_error: What a failure in the background does at the next step: end training on every rank, or warn.
            buffer_bytes: Host memory of this rank for copies; None: half of what is available, shared with the host's ranks.
            then: Called on every rank, in the save's thread, when the checkpoint is whole and was read back, with how it went.

        Raises:
            UserError: It failed before it began, or (unless `background`) at all: where it failed with the reason, elsewhere
                with that rank.
        """
        self._refuse_closed()
        if self._compute == "fp64":
            raise UserError("fp64 is for tests: checkpoints hold fp32", "MeshEngine.save", "use compute_dtype fp32")
        kept = {"step": self.step, "updates": self.updates, "seed": self.seed, "loss_scale": None, "extra": extra or {}}
        with self.watch("save"):
            options = SaveOptions(not background, weights_only, on_error, buffer_bytes, then)
            return self._desk.start(Path(folder), kept, options)

    def wait_saved(self) -> None:
        """Wait for the save in progress, if there is one. Collective. Raises as the next step would."""
        with self.watch("save", "wait for the save"):
            self._desk.end()

    def cancel_save(self) -> None:
        """Give a save in progress up; nothing of it is left. For a rank that must end: not collective."""
        self._desk.cancel()

    def load(self, folder: str | Path, *, wait: bool = True) -> dict[str, Any]:
        """Restore weights, moments and step from a checkpoint of either engine and any layout. Collective.

        Each rank reads its own parts of the tensors alone, and verifies a share of the checkpoint, so that all together read
        it twice whatever their number. What the family saves in another form than it computes with is read by whole units.

        Args:
            folder: A complete checkpoint of this model.
            wait: All is there on return in either case.

        Returns:
            The `extra` it was saved with.

        Raises:
            UserError: The checkpoint is damaged, or another model's, or another rank could not read it.
        """
        super()._refuse_closed()  # a failed load is no obstacle
        refuse_other_config(Path(folder), self.config)
        self.wait_saved()
        with self.watch("load"):
            return self._load(Path(folder))

    def _load(self, directory: Path) -> dict[str, Any]:
        state: dict[str, Any] | None = None
        self._mixture = directory
        try:
            with OpenCheckpoint(directory, self.structure, self.optim) as opened:
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
            raise Aftermath("another rank could not read the checkpoint", str(directory), "see that rank's error")
        self.step, self.updates, self.seed = state["step"], state["updates"], state["seed"]
        self.state.set_updates(self.updates)
        self._share_buffers()
        self._copy_buffers()
        self._mixture = None
        return state["extra"]

    def _refuse_closed(self) -> None:
        """Raise, too, where what the ranks hold is no consistent state."""
        super()._refuse_closed()
        if self._mixture is not None:
            raise UserError(
                f"the load of {self._mixture} has failed, the weights are a mixture", remedy="load a checkpoint again"
            )

    def memory(self) -> dict[str, int]:
        """Bytes on this rank: `device_state` (masters, moments), `device_peak`."""
        held = [local(p) for _, p, _, _ in self.gradients.all()]
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        planes = 1 + len(self.optim.states)
        return {"device_state": planes * sum(t.numel() * t.element_size() for t in held), "device_peak": peak}

    def _fill(self, model: str | Path | nn.Module, init: str | None) -> None:
        if isinstance(model, nn.Module):
            parameters = dict(model.named_parameters(remove_duplicate=False))
            for unit in self.structure.units:
                for _, name in unit.full_names():
                    self.state.write(name, parameters[name])
        elif init == "empty":
            for unit in self.structure.units:
                for _, name in unit.full_names():
                    self.state.write(name, torch.zeros(()).expand(_shape(self.structure, name)))
        elif init == "random":
            initialize(self.structure, self.state, seed=self.seed, device=self.device)  # type: ignore[arg-type]
        else:
            assert self.source_folder is not None
            load_weights(self.source_folder, self.structure, self.state, self._buffers)  # type: ignore[arg-type]
        self._copy_buffers()

    def _share_buffers(self) -> None:
        """What the holders of a unit have read of its buffers, to all ranks: any of them may write the unit."""
        of_holder: dict[int, list[str]] = {}
        for name, unit in unit_of_names(self.structure).items():
            if name in self._buffers and (holder := self.state.holder(unit)) is not None:
                of_holder.setdefault(holder, []).append(name)
        for holder, names in of_holder.items():
            said = [{name: self._buffers[name] for name in names}]
            dist.broadcast_object_list(said, src=holder, group=self.devices.save_group)
            for name, value in said[0].items():
                self._buffers[name].copy_(value)

    def _copy_buffers(self) -> None:
        """The model's persistent buffers (a router's correction bias) into the stages' copies."""
        for stage in self.stages:
            for name, buffer in stage.model.named_buffers():
                if name in self._buffers:
                    buffer.copy_(self._buffers[name])

    def close(self) -> None:
        """Let go of the model. A closed engine refuses every further call; process groups stay the caller's."""
        with self.watch("save", "wait for the last save"):
            self._desk.close()
        self._closed = True
        self.stages.clear()

    # ---------------------------------------------------------------- construction

    def _build(self, model: Any, config: Any, trust_remote_code: bool, attention: str | None) -> Any:
        """The whole model on meta, in the masters' type, also where the family's code asks for fp32."""
        meta = build_model(model, config, MASTERS[self._compute], trust_remote_code, attention)
        for parameter in meta.parameters():
            parameter.data = parameter.data.to(MASTERS[self._compute])
        if self.layout.context > 1:
            if not getattr(meta, "_supports_attention_backend", False):
                raise UserError(
                    f"{type(meta).__name__}'s attention cannot be replaced, which context parallel needs",
                    "parallel.context",
                    "set it to 1",
                )
            meta.set_attn_implementation(context.NAME)
        return meta

    def _check_model(self, meta: Any) -> None:
        problems = []
        stack: Any = meta.get_submodule(self.structure.layers_name)
        for index, layer in enumerate(stack):
            modules_in_fp32(layer, self._in_fp32, f"{self.structure.layers_name}.{index}")
        edges = {name for unit in (self.structure.embedding, self.structure.head) for _, name in unit.full_names()}
        if kept := sorted(edges & self._in_fp32):
            problems.append(f"{kept[0]} must stay in fp32, which bf16 compute does not do here; fp32 compute would")
        if (
            self.layout.pipeline > 1
            and dropout_keys(meta.config.get_text_config())
            and self.layout.kind.splits_backward
        ):
            problems.append(
                f"dropout with schedule {self.layout.schedule} is not supported; 1f1b or interleaved would fit"
            )
        if problems:
            raise UserError("; ".join(problems), "MeshEngine")
        if whole_attention(meta.config, self.layout.tensor):
            logger.warning(
                "the model's heads do not divide over %d tensor ranks: each of them computes the whole attention",
                self.layout.tensor,
            )

    def _why_eager(self, meta: nn.Module) -> str | None:
        layout = self.layout
        if layout.context > 1:
            return "attention of context ranks exchanges keys and values by calls that are not compiled"
        if layout.tensor > 1 and splits_experts(meta):
            return "experts of a tensor rank see another number of tokens each time"
        if layout.pipeline > 1 and layout.kind.splits_backward:
            return f"schedule {layout.schedule} puts gradients off, which compiled layers do not"
        return "fp64 is for tests" if self._compute == "fp64" else None

    def _compile_layers(self, layers: Sequence[nn.Module]) -> None:
        """Let equal layers run one compiled function, with their own weights. See [Note: template groups] in templates.py.

        The function's module is a copy on meta, made before FSDP puts its hooks on the layer: they stay outside.
        """
        codes: dict[int, LayerCode] = {}
        for layer, group in zip(layers, template_groups(layers), strict=True):
            if group not in codes:
                codes[group] = LayerCode(copy.deepcopy(layer), f"layer_{group}", compiled=True)
            layer.forward = functools.partial(_run_code, codes[group], layer)

    def _make_stage(self, meta: nn.Module, part: Part, recompute: bool) -> tuple[Stage, Any]:
        layout = self.layout
        stage = Stage(cut(meta, self.structure, part), self.structure, part, layout.tensor)
        if layout.tensor > 1:
            parallelize(stage, self.structure, self.devices.mesh["tensor"])
        if layout.context > 1:
            stage.token_map = self._token_map
        if layout.pipeline > 1 and layout.kind.splits_backward:
            stage.deferred = Deferred()
            for layer in stage.own_layers():
                stage.deferred.install(layer)
        if self._compute == "fp64":
            stage.checkpoint_kwargs["context_fn"] = exact.both
        if self.compiled:
            self._compile_layers(stage.own_layers())
        if recompute:
            for layer in stage.own_layers():
                layer.forward = functools.partial(checkpoint, layer.forward, **stage.checkpoint_kwargs)  # type: ignore[method-assign]
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self._compute == "bf16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        boxes = shard(stage, self.devices, policy, layout.pipeline > 1, self._in_fp32)
        if not part.first or layout.tensor > 1:
            stage.hook_entry()
        return stage, boxes

    def _token_map(self, tokens: int, documents: torch.Tensor | None) -> TokenMap:
        group = self.devices.context_group
        assert group is not None
        order = _cached_order(tokens * self.layout.context, self.layout.context).to(self.device)
        first = self.devices.at.context * tokens
        return TokenMap(group, order, documents, slice(first, first + tokens))

    # ---------------------------------------------------------------- small parts

    def _checked(self, batch: Mapping[str, torch.Tensor]) -> tuple[Batch, int]:
        checked, tokens = super()._checked(batch)
        return without_mask(checked), tokens

    def _exact(self) -> contextlib.AbstractContextManager[Any]:
        return exact.Fp32MeansFp64() if self._compute == "fp64" else contextlib.nullcontext()

    def _fastest_attention(self, pieces: Microbatches) -> contextlib.AbstractContextManager[Any]:
        """As measured on this device, for the heads that a rank computes. Context parallel has a mask, and torch's choice."""
        shape, layout = attention_shape(self.config.get_text_config()), self.layout
        if layout.context > 1:
            shape = None
        elif shape is not None and not whole_attention(self.config, layout.tensor):
            shape = shape[0] // layout.tensor, shape[1] // layout.tensor, shape[2]
        tokens = pieces[0]["input_ids"].shape[1]
        return fastest_attention(attention_order(shape, tokens, COMPUTE[self._compute], self.device))

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """Dropout of this step on this rank, a function of seed, step and the rank's rows and layers."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            at = self.devices.at
            torch.manual_seed(hash((self.seed, self.step, at.pipeline, at.replicate, at.shard)) & (2**63 - 1))
            yield


def _run_code(code: LayerCode, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A layer's forward, while FSDP has its weights there."""
    return code("keep", {**dict(layer.named_parameters()), **dict(layer.named_buffers())}, args, kwargs)


def plan_parts(structure: Structure, layout: Layout) -> list[Part]:
    """Which layers each stage gets: as the layout says, or even by parameters."""
    layers = [unit.layout.param_count for unit in structure.layers]
    embedding, head = structure.embedding.layout.param_count, structure.head.layout.param_count
    head += sum(_numel(_shape(structure, owner)) for owner in structure.tied.values())
    if layout.stage_layers is not None:
        starts = [sum(layout.stage_layers[:s]) for s in range(layout.stages + 1)]
        cuts = [range(a, b) for a, b in itertools.pairwise(starts)]
    else:
        cuts = split_layers(len(layers), layout.stages, sum(layers) / len(layers), embedding, head)
    return [Part(index, layout.stages, part) for index, part in enumerate(cuts)]


def _shape(structure: Structure, name: str) -> tuple[int, ...]:
    return tuple(structure.model.get_parameter(name).shape)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@functools.lru_cache(maxsize=8)
def _cached_order(tokens: int, parts: int) -> torch.Tensor:
    return zigzag_order(tokens, parts)

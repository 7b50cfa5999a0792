"""A stage: the part of a Hugging Face model held by one pipeline rank, run by Hugging Face's own forward.

[Note: how a model is cut]
The model is copied on meta, and every module of another stage is replaced by a placeholder without parameters; the remaining
modules keep their names, so checkpoints fit. Hugging Face's forward of the base model runs unchanged on every stage. The first
stage passes it token ids. A later stage passes zeros of the right shape as `inputs_embeds`: Hugging Face makes masks and rotary
tables from their shape, scales them as the family scales embeddings, and sends them through the placeholder layers, which return
their input. A hook in front of the stage's first own layer then replaces them with the hidden states received from the previous
stage. So whatever a family does to its embeddings (granite and gemma scale them) happens once, on the first stage, without
family-specific code here. Families that pass more than hidden states between layers compute something else; `verify_cut` detects
them.

[Note: tokens of a tensor group]
With tensor parallel the residual stream is split by tokens over the ranks of the group (sequence parallel), from the first own
layer to the final norm. The embedding, masks and rotary tables see all tokens.

Shapes: B rows of a microbatch, L tokens on this context rank, S = L / tensor tokens of the residual stream on this rank,
D hidden size, V vocabulary, N target tokens.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatrain.engine.mesh.context_parallel import ARGUMENT, TokenMap
from megatrain.engine.mesh.head import ChunkedHead
from megatrain.engine.mesh.layout import Layout, ranges_of, split_layers
from megatrain.engine.mesh.zero_bubble import WeightGradStore
from megatrain.engine.objective import IGNORED, cross_entropy_sum
from megatrain.engine.parity_check import NoTinyCopy, find_differences, tiny_model
from megatrain.errors import UserError
from megatrain.models.shell import GivenStates
from megatrain.models.structure import Structure, dissect, with_submodule

CANNOT_CUT = "this family cannot be cut into pipeline stages: set parallel.pipeline to 1"


@dataclass(frozen=True)
class Part:
    """The part of the model that a stage holds: stage `index` of `count`, and its layers."""

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


def plan_parts(structure: Structure, layout: Layout) -> list[Part]:
    """The layers of each stage: as the layout says, or balanced by parameters, with embedding and head counted."""
    if layout.stage_layers is not None:
        cuts = ranges_of(layout.stage_layers)
    else:
        layers = [unit.layout.param_count for unit in structure.layers]
        tied = sum(structure.model.get_parameter(owner).numel() for owner in structure.tied.values())
        head = structure.head.layout.param_count + tied
        embedding = structure.embedding.layout.param_count
        cuts = split_layers(len(layers), layout.stages, sum(layers) / len(layers), embedding, head)
    return [Part(index, layout.stages, layers) for index, layers in enumerate(cuts)]


class _Placeholder(nn.Module):
    """Placeholder for a module owned by another pipeline stage: has its plain attributes but no parameters, returns its input.

    A module `before_layers` (an embedding) must not be called.
    """

    def __init__(self, module: nn.Module, name: str, before_layers: bool = False):
        super().__init__()
        plain = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
        object.__setattr__(self, "_plain", plain)
        self._name, self._before = name, before_layers

    def __getattr__(self, name: str) -> Any:
        plain = object.__getattribute__(self, "_plain")
        if name in plain:
            return plain[name]
        return super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._before:
            raise UserError(f"the family reads {self._name} on every stage", remedy=CANNOT_CUT)
        return args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))


class Stage(nn.Module):
    """One stage as a module: token ids or hidden states in, hidden states or the loss out.

    Args:
        model: The cut CausalLM.
        structure: The whole model's.
        tensor: Ranks of the tensor group.
    """

    def __init__(self, model: nn.Module, structure: Structure, part: Part, tensor: int = 1):
        super().__init__()
        self.model = model
        self.part = part
        self.tensor = tensor
        self.weight_grads: WeightGradStore | None = None
        """Only with schedules that split the backward."""
        self.checkpoint_kwargs: dict[str, Any] = {"use_reentrant": False}
        self.loss_divisor = 1.0
        """Target tokens of the whole step; set before each step."""
        self.enter: Callable[[torch.Tensor], torch.Tensor] | None = None
        """On the first stage of a tensor group: the embedding's output (B, L, D) -> this rank's residual stream (B, S, D)."""
        self.leave: Callable[[torch.Tensor], torch.Tensor] | None = None
        """On the last stage of a tensor group: this rank's residual stream (B, S, D) -> the head's input (B, L, D)."""
        self.split: dict[str, tuple[int, int]] = {}
        """Parameters sharded over tensor ranks: HF name -> (sharded dimension, its full length)."""
        self.token_map: Callable[[int, torch.Tensor | None], TokenMap] | None = None
        """Makes a microbatch's `TokenMap` from (L, documents); None without context parallel."""
        base = model.get_submodule(structure.base_name)
        layers_path = structure.layers_name.removeprefix(structure.base_name + ".")
        # In a tuple, hidden from nn.Module: they are parts of `model`, whose names must not occur twice.
        head = with_submodule(model, structure.base_name, GivenStates(base, layers_path))
        self._views = (base, head, model.get_submodule(structure.layers_name))
        self.head = ChunkedHead(self._logits)
        self._layers_name = structure.layers_name
        self._received: torch.Tensor | None = None

    def own_layers(self) -> list[nn.Module]:
        return [layer for _, layer in self.named_own_layers()]

    def named_own_layers(self) -> list[tuple[str, nn.Module]]:
        """(Hugging Face name, layer) of this stage's layers."""
        return [(f"{self._layers_name}.{i}", self._views[2][i]) for i in self.part.layers]  # type: ignore[index]

    def hook_entry(self) -> None:
        """Feed received hidden states to the first own layer. Call it after everything else that hooks this layer."""
        self.own_layers()[0].register_forward_pre_hook(self._replace_hidden, prepend=True, with_kwargs=True)

    def _replace_hidden(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self._received is not None:
            hidden, self._received = self._received, None
        elif self.enter is not None:
            hidden = self.enter(hidden)
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def forward(
        self,
        given: torch.Tensor,
        *,
        position_ids: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the stage on one microbatch.

        Args:
            given: Token ids (B, L) on the first stage, elsewhere the previous stage's hidden states (B, S, D).
            position_ids: (B, L), needed if they are not simply 0..L-1.
            documents: (B, T) of the gathered tokens, with context parallel and packed rows.
            labels: (B, L), shifted: the label each token predicts, -100 for none. Read by the last stage.

        Returns:
            Hidden states (B, S, D); on the last stage the loss (1,): sum of cross entropies / `loss_divisor`.
        """
        hidden = self._hidden(given, position_ids, documents)
        if not self.part.last:
            return hidden
        assert labels is not None, "the last stage needs labels"
        hidden_BLD = hidden if self.leave is None else self.leave(hidden)
        parameters = list(self._views[1].parameters())
        # Stacked, because FSDP hooks outputs, which may not be views.
        return torch.stack([self.head.loss(hidden_BLD, labels, parameters, self.loss_divisor)])

    def _hidden(
        self, given: torch.Tensor, position_ids: torch.Tensor | None, documents: torch.Tensor | None
    ) -> torch.Tensor:
        kwargs: dict[str, Any] = {"use_cache": False}
        if self.part.first:
            kwargs["input_ids"] = given
            tokens = given.shape[1]
        else:
            self._received = given
            tokens = given.shape[1] * self.tensor
            kwargs["inputs_embeds"] = given.new_zeros(()).expand(given.shape[0], tokens, given.shape[2])
        if position_ids is not None:
            kwargs["position_ids"] = position_ids
        if self.token_map is not None:
            kwargs[ARGUMENT] = self.token_map(tokens, documents)
        output = self._views[0](**kwargs)
        return output[0] if isinstance(output, tuple) else output.last_hidden_state

    def _logits(self, hidden_BLD: torch.Tensor) -> torch.Tensor:
        return self._views[1](inputs_embeds=hidden_BLD, use_cache=False).logits


def cut(model: nn.Module, structure: Structure, part: Part) -> nn.Module:
    """A copy of `model` with only the modules of one stage, sharing their parameters; see [Note: how a model is cut].

    Raises a UserError if parameters sit on modules that cannot be left out.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, memo)
    stack: Any = twin.get_submodule(structure.layers_name)
    for index in range(len(stack)):
        if index not in part.layers:
            stack[index] = _Placeholder(stack[index], f"layer {index}")
    if part.count == 1:
        return twin
    embedding, head = ([name for _, name in unit.full_names()] for unit in (structure.embedding, structure.head))
    keep = set(embedding if part.first else ())
    if part.last:
        keep.update(head, (alias for alias, owner in structure.tied.items() if owner in embedding))
    kept_paths = {name.rpartition(".")[0] for name in keep}
    for name in (*embedding, *head, *structure.tied):
        if name not in keep:
            _leave_out(twin, name, name in embedding, kept_paths)
    return twin


def _leave_out(model: nn.Module, name: str, before_layers: bool, kept_paths: set[str]) -> None:
    """Replace the module of a parameter by a placeholder."""
    path, _, _ = name.rpartition(".")
    parent_path, _, leaf = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    module = parent._modules.get(leaf)
    if isinstance(module, _Placeholder):
        return
    if module is None or next(module.children(), None) is not None or path in kept_paths:
        raise UserError(f"{name} sits on a module that a stage cannot leave out", remedy=CANNOT_CUT)
    parent._modules[leaf] = _Placeholder(module, path, before_layers)


logger = logging.getLogger(__name__)

CUT = frozenset(
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text granite cohere smollm3 olmo2 qwen3_moe mixtral gpt_neox".split()
)
"""Model types whose chain of stages is part of the test suite."""


def verify_family_cut(config: Any, trust_remote_code: bool = False) -> None:
    """Compare a chain of stages of a tiny copy with plain Hugging Face, unless the test suite covers the family.

    Raises:
        UserError: The family cannot be cut into pipeline stages, or computes something else when it is.
    """
    if config.model_type in CUT:
        return
    logger.debug("checking on a tiny copy whether %s can be cut into pipeline stages", config.model_type)
    try:
        model = tiny_model(config, None, trust_remote_code)
    except NoTinyCopy as error:
        raise UserError(f"cannot be verified: {error}", f"model type {config.model_type}", CANNOT_CUT) from error
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids_BT = torch.randint(3, vocabulary, (2, 24), generator=torch.Generator().manual_seed(0))
    verify_cut(model, {"input_ids": ids_BT, "labels": ids_BT.clone()})


def verify_cut(model: nn.Module, batch: dict[str, torch.Tensor], stages: int = 2, tolerance: float = 1e-5) -> None:
    """Run a (tiny) model as a chain of stages in this process and compare loss and gradients with plain Hugging Face.

    Args:
        model: With real parameters; its gradients are used and cleared.
        batch: `input_ids` and `labels` (B, T).
        stages: Number of stages, at most the number of layers.
        tolerance: Largest relative difference of loss and gradients.

    Raises:
        UserError: The family differs, or cannot be cut.
    """
    structure, where = dissect(model), f"model type {model.config.model_type}"  # type: ignore[union-attr]
    labels = torch.full_like(batch["labels"], IGNORED)
    labels[:, :-1] = batch["labels"][:, 1:]

    def gradients(loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return float(loss.detach()), found

    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    want_loss, want = gradients(cross_entropy_sum(logits.flatten(0, 1), labels.flatten()))
    layers = len(structure.layers)
    counts = tuple(layers * (s + 1) // stages - layers * s // stages for s in range(stages))
    try:
        state = batch["input_ids"]
        for part in plan_parts(structure, Layout(pipeline=stages, stage_layers=counts)):
            stage = Stage(cut(model, structure, part), structure, part)
            stage.train(model.training)
            stage.hook_entry()
            state = stage(state, labels=labels)
        loss, got = gradients(state.sum())
    except (RuntimeError, TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"a chain of stages does not run: {type(error).__name__}: {error}", where, CANNOT_CUT
        ) from error
    if differences := find_differences(loss, want_loss, got, want, tolerance, tolerance):
        raise UserError(f"a chain of stages computes something else: {'; '.join(differences[:3])}", where, CANNOT_CUT)

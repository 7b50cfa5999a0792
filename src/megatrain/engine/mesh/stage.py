"""A stage: the part of a Hugging Face model that one pipeline rank holds, run by HF's own forward.

[Note: how a model is cut]
The model is copied on meta, and every module of another stage is replaced by a `ForeignLayer` or a `ForeignEdge`, which have no
parameters; what stays keeps its name, so checkpoints fit. HF's forward of the base model runs unchanged on every stage. The
first stage feeds it token ids. A later stage feeds it zeros of the right shape as `inputs_embeds`: HF makes masks and
rotary tables from their shape, multiplies them by whatever the family multiplies embeddings with, and passes them through the
foreign layers, which hand them on. In front of the stage's first own layer a hook puts the hidden states that came from
the previous stage in their place. So what HF does to embeddings happens once, on the first stage (granite and gemma scale
them), without knowing of any family. Families that carry more than hidden states between layers differ here; `verify_cut`
finds them.

[Note: tokens of a tensor group]
With tensor parallel the residual stream is split by tokens between the ranks of the group (sequence parallel), from the first
own layer to the final norm. The embedding, masks and rotary tables see all tokens.

Shapes: B rows of a microbatch, L tokens on this context rank, S = L / tensor tokens of the residual stream on this rank,
D hidden size, V vocabulary, N target tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatrain.engine.mesh.context_parallel import ARGUMENT, TokenMap
from megatrain.engine.mesh.zero_bubble import Deferred
from megatrain.engine.objective import IGNORED
from megatrain.errors import UserError
from megatrain.models.shell import _GivenStates
from megatrain.models.structure import Structure, dissect, with_submodule

LossSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits (N, V or a part of it), labels (N,) with -100) -> sum of the cross entropies, a scalar."""

HEAD_CHUNK_TOKENS = 4096


@dataclass(frozen=True)
class Part:
    """Which part of the model a stage is.

    Attributes:
        index, count: This stage of how many.
        layers: The layers it holds.
    """

    index: int
    count: int
    layers: range

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


class _Foreign(nn.Module):
    """Stands where a module of another stage would be; has its plain attributes, and no parameters."""

    def __init__(self, module: nn.Module):
        super().__init__()
        plain = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
        object.__setattr__(self, "_plain", plain)

    def __getattr__(self, name: str) -> Any:
        plain = object.__getattribute__(self, "_plain")
        if name in plain:
            return plain[name]
        return super().__getattr__(name)


class ForeignLayer(_Foreign):
    """Hands hidden states on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]


class ForeignEdge(_Foreign):
    """An embedding, norm or head of another stage. Behind the layers it hands its input on; before them it must not run."""

    def __init__(self, module: nn.Module, name: str, before_layers: bool):
        super().__init__(module)
        self._name, self._before = name, before_layers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._before:
            raise UserError(
                f"the family reads {self._name} on every stage",
                remedy="it cannot be cut into pipeline stages: set parallel.pipeline to 1",
            )
        return args[0] if args else next(iter(kwargs.values()))


class Stage(nn.Module):
    """One stage as a module: token ids or hidden states in, hidden states or the loss out.

    Args:
        model: The cut CausalLM.
        structure: Of the whole model.
        part: Which part of it this is.
        tensor: Ranks of the tensor group.
        split_head: Whether logits are computed for a chunk of tokens at a time.
    """

    def __init__(self, model: nn.Module, structure: Structure, part: Part, tensor: int = 1, split_head: bool = True):
        super().__init__()
        self.model = model
        self.part = part
        self.tensor = tensor
        self.split_head = split_head and tensor == 1
        self.deferred: Deferred | None = None
        """With schedules that split the backward."""
        self.checkpoint_kwargs: dict[str, Any] = {"use_reentrant": False}
        self.loss_sum: LossSum = cross_entropy_sum
        self.loss_divisor = 1.0
        """Target tokens of the whole step; set before each step."""
        self.enter: Callable[[torch.Tensor], torch.Tensor] | None = None
        """What turns the embedding's output (B, L, D) into this rank's residual stream (B, S, D), on the first stage."""
        self.split: dict[str, tuple[int, int]] = {}
        """Parameters of which tensor ranks hold parts: HF name -> (dimension that is cut, its length of all parts)."""
        self.token_map: Callable[[int, torch.Tensor | None], TokenMap] | None = None
        """Makes the `TokenMap` of a microbatch from (L, documents); None without context parallel."""
        base = model.get_submodule(structure.base_name)
        layers_path = structure.layers_name.removeprefix(structure.base_name + ".")
        head = with_submodule(model, structure.base_name, _GivenStates(base, layers_path))
        # Beside the module tree: they are parts of `model`, whose names must not occur twice.
        self._beside = (base, head, model.get_submodule(structure.layers_name))
        self._layers_name = structure.layers_name
        self._entering: torch.Tensor | None = None

    def own_layers(self) -> list[nn.Module]:
        return [self._beside[2][i] for i in self.part.layers]  # type: ignore[index]

    def named_own_layers(self) -> list[tuple[str, nn.Module]]:
        """With their Hugging Face names."""
        return [(f"{self._layers_name}.{i}", self._beside[2][i]) for i in self.part.layers]  # type: ignore[index]

    def hook_entry(self) -> None:
        """Put received hidden states in front of the first own layer. To be called after everything else that hooks it."""
        self.own_layers()[0].register_forward_pre_hook(self._replace_hidden, prepend=True, with_kwargs=True)

    def _replace_hidden(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self._entering is not None:
            hidden, self._entering = self._entering, None
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
            given: On the first stage token ids (B, L), elsewhere the hidden states (B, S, D) of the previous stage.
            position_ids: (B, L), where they are not simply 0..L-1.
            documents: (B, T) of the gathered tokens, with context parallel and packed rows.
            labels: (B, L) what each token should predict, -100 for nothing. Read by the last stage.

        Returns:
            Hidden states (B, S, D), on the last stage the loss (1,): sum of cross entropies / `loss_divisor`.
        """
        hidden = self._hidden(given, position_ids, documents)
        if not self.part.last:
            return hidden
        assert labels is not None, "the last stage needs labels"
        return torch.stack([self._loss(hidden, labels) / self.loss_divisor])  # not a view: FSDP hooks outputs

    def _hidden(
        self, given: torch.Tensor, position_ids: torch.Tensor | None, documents: torch.Tensor | None
    ) -> torch.Tensor:
        kwargs: dict[str, Any] = {"use_cache": False}
        if self.part.first:
            kwargs["input_ids"] = given
            tokens = given.shape[1]
        else:
            self._entering = given
            tokens = given.shape[1] * self.tensor
            kwargs["inputs_embeds"] = given.new_zeros(()).expand(given.shape[0], tokens, given.shape[2])
        if position_ids is not None:
            kwargs["position_ids"] = position_ids
        if self.token_map is not None:
            kwargs[ARGUMENT] = self.token_map(tokens, documents)
        output = self._beside[0](**kwargs)
        return output[0] if isinstance(output, tuple) else output.last_hidden_state

    def _loss(self, hidden_BSD: torch.Tensor, labels_BL: torch.Tensor) -> torch.Tensor:
        if self.tensor > 1:
            logits = self._logits(hidden_BSD)
            return self.loss_sum(logits.flatten(0, 1), labels_BL.flatten())
        labels = labels_BL.flatten()
        targets = torch.nonzero(labels != IGNORED).flatten()
        hidden_ND, labels_N = hidden_BSD.flatten(0, 1)[targets], labels[targets]
        if not self.split_head:
            return self._chunk_loss(hidden_ND, labels_N)
        losses = []
        for start in range(0, max(1, len(labels_N)), HEAD_CHUNK_TOKENS):
            chunk = slice(start, start + HEAD_CHUNK_TOKENS)
            losses.append(checkpoint(self._chunk_loss, hidden_ND[chunk], labels_N[chunk], **self.checkpoint_kwargs))
        return torch.stack(losses).sum()

    def _chunk_loss(self, hidden_ND: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        return self.loss_sum(self._logits(hidden_ND.unsqueeze(0))[0], labels_N)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._beside[1](inputs_embeds=hidden, use_cache=False).logits


def cross_entropy_sum(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropies over the targets: a scalar, in fp32 or the logits' type if that is wider."""
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORED, reduction="sum")


def cut(model: nn.Module, structure: Structure, part: Part) -> nn.Module:
    """A copy of `model` in which only the modules of one stage are left; see [Note: how a model is cut].

    Args:
        model: The whole CausalLM; parameters on meta cost nothing to copy, real ones are shared with the copy.
        structure: Of `model`.
        part: The stage.

    Raises:
        UserError: Parameters sit where they cannot be left out.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, memo)
    stack = twin.get_submodule(structure.layers_name)
    for index in range(len(stack)):  # type: ignore[arg-type]
        if index not in part.layers:
            stack[index] = ForeignLayer(stack[index])  # type: ignore[index,operator]
    keep: set[str] = set()
    if part.first:
        keep |= {name for _, name in structure.embedding.full_names()}
    if part.last:
        keep |= {name for _, name in structure.head.full_names()}
        keep |= {alias for alias, owner in structure.tied.items() if _before_layers(structure, owner)}
    before = {name for _, name in structure.embedding.full_names()}
    edges = [name for unit in (structure.embedding, structure.head) for _, name in unit.full_names()] + list(
        structure.tied
    )
    if part.count > 1:
        for name in edges:
            if name not in keep:
                _leave_out(twin, name, name in before, {n.rpartition(".")[0] for n in keep})
    return twin


def _before_layers(structure: Structure, name: str) -> bool:
    return any(name == full for _, full in structure.embedding.full_names())


def _leave_out(model: nn.Module, name: str, before_layers: bool, kept_paths: set[str]) -> None:
    path, _, _ = name.rpartition(".")
    parent_path, _, leaf = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    module = parent._modules.get(leaf)
    if isinstance(module, ForeignEdge):
        return
    if module is None or next(module.children(), None) is not None or path in kept_paths:
        raise UserError(
            f"{name} sits on a module that a stage cannot leave out",
            remedy="this family cannot be cut into pipeline stages: set parallel.pipeline to 1",
        )
    parent._modules[leaf] = ForeignEdge(module, path, before_layers)


def verify_cut(model: nn.Module, batch: dict[str, torch.Tensor], stages: int = 2, tolerance: float = 1e-5) -> None:
    """Run a (tiny) model as a chain of stages in this process, and compare loss and gradients with plain Hugging Face.

    Args:
        model: With real parameters; its gradients are used and cleared.
        batch: `input_ids` and `labels` (B, T).
        stages: Into how many stages it is cut, at most its number of layers.
        tolerance: Largest relative difference.

    Raises:
        UserError: The family differs, or cannot be cut.
    """
    structure = dissect(model)
    layers = len(structure.layers)
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
    where = f"model type {model.config.model_type}"  # type: ignore[union-attr]
    remedy = "this family cannot be cut into pipeline stages: set parallel.pipeline to 1"
    try:
        state = batch["input_ids"]
        bounds = [layers * s // stages for s in range(stages + 1)]
        for s in range(stages):
            part = Part(s, stages, range(bounds[s], bounds[s + 1]))
            stage = Stage(cut(model, structure, part), structure, part, split_head=False)
            stage.train(model.training)
            stage.hook_entry()
            state = stage(state, labels=labels)
        loss, got = gradients(state.sum())
    except (RuntimeError, TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
        raise UserError(f"a chain of stages does not run: {type(error).__name__}: {error}", where, remedy) from error
    differences = []
    if not abs(loss - want_loss) <= tolerance * abs(want_loss):
        differences.append(f"loss {loss:.6f} instead of {want_loss:.6f}")
    largest = max(float(g.norm()) for g in want.values())
    for name, gradient in want.items():
        error = float((got[name] - gradient).norm()) if name in got else float("inf")
        if not error <= tolerance * (float(gradient.norm()) + 1e-3 * largest):
            differences.append(f"gradient of {name} off by {error / (float(gradient.norm()) + 1e-30):.1e}")
    if differences:
        raise UserError(f"a chain of stages computes something else: {'; '.join(differences[:3])}", where, remedy)

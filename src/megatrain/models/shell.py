"""The shell: Hugging Face's own model code around layers that hold no weights.

[Note: the shell stays Hugging Face's]
The CausalLM is copied shallowly along the path to its layer stack, and the entries of the stack are replaced by
`StreamedLayer`s: modules without parameters that pass their call to the engine. HF's own forward then runs unchanged: embedding
scale, rotary tables, all kinds of masks, the loop over the layers, the final norm. The engine computes a layer by binding that
layer's weights and buffers to HF's own layer module for one call (`functional_call`).
The head runs HF's own CausalLM forward as well, with the base model replaced by a module that returns given hidden states. So
soft caps, logit scales and other details of a family stay right, and logits exist for one chunk of tokens at a time.

Shapes: B rows, T tokens, N tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from megatrain.errors import UserError
from megatrain.models.block_masks import short_block_masks
from megatrain.models.chunked_mlp import ModuleKey, TokenChunks, mlp_matrices, modules_in_chunks
from megatrain.models.routers import RouterLoss, RouterProbe, experts_of, routers_of
from megatrain.models.structure import LayerStandIn, Structure, attention_shape, attention_window, with_submodule
from megatrain.models.templates import CHUNKABLE, KeepRule, LayerCode, Variant, template_groups

FLEX = "flex_attention"
"""Hugging Face's name of flex attention."""
RunLayer = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""(layer index, positional arguments, keyword arguments) -> the output of HF's layer."""


class StreamedLayer(LayerStandIn):
    """A layer without weights that passes its call to the engine."""

    def __init__(self, index: int, module: nn.Module, run: RunLayer):
        super().__init__(module)
        self.index = index
        object.__setattr__(self, "_run", run)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.index, args, kwargs)


class GivenStates(nn.Module):
    """Replaces the base model in the head: returns the hidden states given as `inputs_embeds`.

    Plain attributes (multipliers) are the base model's. A submodule on the path to the layers (OPT's heads call
    `self.model.decoder`) is this module again.
    """

    def __init__(self, base: nn.Module, layers_path: str):
        super().__init__()
        object.__setattr__(self, "_base", base)
        self._around_layers = set(layers_path.split(".")[:-1])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self._around_layers:
                return self
            return getattr(object.__getattribute__(self, "_base"), name)

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _GivenOutput:
        return _GivenOutput(inputs_embeds)


class _GivenOutput:
    """A base model output with hidden states only; every other field is None."""

    def __init__(self, last_hidden_state: torch.Tensor):
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def _compute_chunk(
    code: LayerCode, with_backward: bool, bound: Mapping[str, torch.Tensor], hidden_1nD: torch.Tensor
) -> torch.Tensor:
    return code("recompute" if with_backward else "forward", bound, (hidden_1nD,), {})


def _can_flex(model: nn.Module) -> bool:
    """Whether the family supports flex attention and its head size suits the kernels (a power of two, at least 16)."""
    shape = attention_shape(model.config.get_text_config())  # type: ignore[union-attr,operator]
    dim = shape[2] if shape is not None and getattr(model, "_supports_flex_attn", False) else 0
    return dim >= 16 and dim & (dim - 1) == 0


class Shell:
    """HF's code around the layers, and the layers' code. See [Note: the shell stays Hugging Face's].

    Args:
        structure: Not changed.
        buffers: All buffers of the model by full name, on the device.
        run_layer: Called in place of each layer, in the order of HF's loop.
        fp32_names: Full names of parameters that HF keeps in fp32 whatever the compute dtype.
        budget: Activation memory budget of the `selective` variant.
        flex: Use flex attention, if the family supports it, for packed rows and for rows longer than a layer's window: block
            masks instead of T x T masks.
        deterministic: Use it for all rows.
        keeps_mlps: Whether some layers use the `keep_mlp` variant.
        token_wise: Returns the modules that can be computed in chunks of tokens, from `find_token_wise`. Called only if needed,
            at most twice.
        router_loss: The auxiliary loss of the routers, if the model is trained with it.
        needs_loads: Whether training depends on the load of the experts.

    Attributes:
        head_names: Full names of the trained parameters that `logits` reads.
        groups: Template group of each layer.
        routers: Routers of each layer that the auxiliary loss covers.
        watched: Layers whose routers `call_layer` can record: those with routers or experts.
        chunk_tokens: Maximum tokens that MLPs and the norms after the layers compute at once; None: all.
    """

    def __init__(
        self,
        structure: Structure,
        buffers: Mapping[str, torch.Tensor],
        run_layer: RunLayer,
        fp32_names: frozenset[str] = frozenset(),
        compiled: bool = False,
        budget: float = 1.0,
        flex: bool = False,
        deterministic: bool = False,
        keeps_mlps: bool = False,
        token_wise: Callable[[], Mapping[ModuleKey, str]] = dict,
        router_loss: RouterLoss | None = None,
        needs_loads: bool = False,
    ):
        self.structure = structure
        self.layers: list[nn.Module] = list(structure.layer_stack())
        self.fp32_names = fp32_names
        streamed = nn.ModuleList(StreamedLayer(i, module, run_layer) for i, module in enumerate(self.layers))
        model = with_submodule(structure.model, structure.layers_name, streamed)
        self._base: Any = model.get_submodule(structure.base_name)
        self._base_prefix = structure.base_name + "."
        layers_path = structure.layers_name.removeprefix(self._base_prefix)
        self._head = with_submodule(model, structure.base_name, GivenStates(self._base, layers_path))
        edge_names = [name for unit in (structure.embedding, structure.head) for _, name in unit.full_names()]
        tied_heads = {name for alias, name in structure.tied.items() if not alias.startswith(self._base_prefix)}
        self.head_names = [
            name
            for name in edge_names
            if name not in structure.frozen and (not name.startswith(self._base_prefix) or name in tied_heads)
        ]
        self._plain_attention = self._base.config._attn_implementation
        flex = flex and self._plain_attention == "sdpa" and _can_flex(structure.model)
        self._masked_attention = FLEX if flex else self._plain_attention
        self._deterministic, self._runs_eager = deterministic, False
        self._window = attention_window(structure.model.config)
        self._base_accepts = set(inspect.signature(self._base.forward).parameters)
        self.groups = template_groups(self.layers)
        templates = [self.layers[self.groups.index(group)] for group in sorted(set(self.groups))]
        self._token_wise = token_wise
        self._probe, self._needs_loads = RouterProbe(router_loss), needs_loads
        self.routers = self._watch_routers(layers_path)
        self.watched = frozenset(i for i, layer in enumerate(self.layers) if self.routers[i] or experts_of(layer))
        self.chunk_tokens: int | None = None
        self._chunks: list[TokenChunks] = []
        self._chunk_codes: dict[tuple[int, str], LayerCode] = {}  # by template group and path
        self._streamed_base, self._layers_in_chunks = self._base, self.layers
        candidates = token_wise() if keeps_mlps else {}
        self._code = [
            LayerCode(module, f"layer_{i}", compiled, budget, mlp_matrices(module, candidates), self._probe)
            for i, module in enumerate(templates)
        ]
        self._layer_buffers: list[dict[str, torch.Tensor]] = [{} for _ in self.layers]
        self._base_buffers: dict[str, torch.Tensor] = {}
        self._head_buffers: dict[str, torch.Tensor] = {}
        layers_prefix = structure.layers_name + "."
        for name, buffer in buffers.items():
            if name.startswith(layers_prefix):
                index, local = name[len(layers_prefix) :].split(".", 1)
                self._layer_buffers[int(index)][local] = buffer
            elif name.startswith(self._base_prefix):
                self._base_buffers[name.removeprefix(self._base_prefix)] = buffer
            else:
                self._head_buffers[name] = buffer

    def _watch_routers(self, layers_path: str) -> list[int]:
        """Let the probe see the routers and experts of all layers. Returns the number of routers in each layer, 0 without the
        auxiliary loss."""
        counts = []
        for i, layer in enumerate(self.layers):
            routers = routers_of(self._base, layer, f"{layers_path}.{i}") if self._probe.loss is not None else []
            for router, index in routers:
                self._probe.watch(router, index)
            for experts in experts_of(layer):
                self._probe.watch_experts(experts)
            counts.append(len(routers))
        return counts

    @functools.cached_property
    def _paths_in_chunks(self) -> tuple[list[str], list[list[str]]]:
        """Paths of the modules that can be computed in chunks of tokens: of the base model, and of each layer."""
        candidates = self._token_wise()

        def paths(module: nn.Module, prefix: str) -> list[str]:
            fp32_names = {name.removeprefix(prefix) for name in self.fp32_names if name.startswith(prefix)}
            found = modules_in_chunks(module, candidates, fp32_names)
            # The gradient of the auxiliary loss cannot enter a module in chunks, and loads are not counted inside.
            return [
                path
                for path in found
                if not (self._probe.loss and routers_of(self._base, module.get_submodule(path), prefix + path))
                and not (self._needs_loads and experts_of(module.get_submodule(path)))
            ]

        units = self.structure.layers
        of_layers = [paths(layer, unit.prefix) for layer, unit in zip(self.layers, units, strict=True)]
        return paths(self._base, self._base_prefix), of_layers

    @property
    def can_chunk_mlps(self) -> bool:
        """Whether the MLP of any layer can be computed in chunks of tokens."""
        return any(self._paths_in_chunks[1])

    def compute_in_chunks(self, tokens: int) -> None:
        """From the next call on, compute token-wise MLPs and norms after the layers in chunks of at most `tokens` tokens.

        No layer may be running, and no autograd graph of a layer may be waiting for its backward.
        """
        if self.chunk_tokens is None:
            self._make_chunked(tokens)
        self.chunk_tokens = tokens
        for chunks in self._chunks:
            chunks.tokens = tokens
        for code in self._chunk_codes.values():
            code.compute_in_chunks(code.module)
        for group, code in enumerate(self._code):
            code.compute_in_chunks(self._layers_in_chunks[self.groups.index(group)])

    def _make_chunked(self, tokens: int) -> None:
        """Make copies of the layers and the base model whose MLPs and norms compute in chunks of tokens."""

        def chunked(root: nn.Module, paths: Sequence[str], group: int | None) -> nn.Module:
            for path in paths:
                module = root.get_submodule(path)
                code = LayerCode(module, path, compiled=False)
                if group is not None and self._code[group].compiled:
                    name = f"layer_{group}_{path.replace('.', '_')}"
                    code = self._chunk_codes.setdefault((group, path), LayerCode(module, name, compiled=True))
                chunks = TokenChunks(module, functools.partial(_compute_chunk, code), tokens)
                self._chunks.append(chunks)
                root = with_submodule(root, path, chunks.chunked_module())
            return root

        of_base, of_layers = self._paths_in_chunks
        self._streamed_base = chunked(self._base, of_base, None)
        self._layers_in_chunks = list(map(chunked, self.layers, of_layers, self.groups))

    def compiled(self, index: int) -> bool:
        """Whether layer `index` runs compiled code; False once its compilation has failed."""
        return self._code[self.groups[index]].compiled

    def keep_rule(self, index: int, variant: Variant) -> KeepRule:
        """Which results layer `index` keeps in a variant of `KEEP_ONE_PART`."""
        return self._code[self.groups[index]].keep_rule(variant)

    @property
    def attention(self) -> str:
        """The attention implementation last set by `choose_attention`."""
        return self._base.config._attn_implementation

    @property
    def uses_block_masks(self) -> bool:
        """Whether the attention last chosen takes block masks (flex attention)."""
        return self.attention == FLEX

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        """Inside, layers run without compiled code, and with the attention of rows without a mask."""
        chosen, self._runs_eager = self.attention, True
        self._set_attention(self._plain_attention)
        try:
            yield
        finally:
            self._runs_eager = False
            self._set_attention(chosen)

    def choose_attention(self, packed: bool, tokens: int) -> None:
        """From now on, use the attention implementation for rows of `tokens` tokens, packed or of one document each.

        Packed rows, and rows longer than a layer's window, need a mask beyond causality, which sdpa takes as T x T entries.
        Other rows need no mask: sdpa's kernels handle causality. But the backward of the fast ones adds in no fixed order, so a
        deterministic shell uses flex attention for all rows.
        """
        masked = packed or (self._window is not None and tokens >= self._window)
        masked = masked or self._deterministic
        self._set_attention(self._masked_attention if masked else self._plain_attention)

    def _set_attention(self, implementation: str) -> None:
        if self.attention != implementation:
            self.structure.model.config._attn_implementation = implementation  # type: ignore[union-attr]

    def train(self, mode: bool) -> None:
        """Set training or evaluation mode (dropout, router jitter) for all modules."""
        for module in (self._base, self._streamed_base, self._head, *self.layers, *self._layers_in_chunks):
            if module.training != mode:
                module.train(mode)

    def hidden_states(self, edges: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run HF's base model: embedding, loop over the (streamed) layers, final norm. Returns hidden states (B, T, D).

        Args:
            edges: Parameters of embedding and head by full name, on the device.
            inputs: `input_ids` (B, T) and optionally `position_ids`, `attention_mask` (B, T), on the device.
        """
        unknown = next((name for name in inputs if name not in self._base_accepts), None)
        if unknown is not None:
            packed = "this family cannot be trained on packed rows: set data.packing: false"
            remedy = packed if unknown == "position_ids" else None
            raise UserError(f"{type(self._base).__name__} takes no {unknown}", remedy=remedy)
        prefix = self._base_prefix
        bound = {n.removeprefix(prefix): tensor for n, tensor in edges.items() if n.startswith(prefix)}
        bound.update(self._base_buffers)
        with short_block_masks() if self.uses_block_masks else contextlib.nullcontext():
            output = functional_call(self._streamed_base, bound, kwargs={**inputs, "use_cache": False})
        return output[0] if isinstance(output, tuple) else output.last_hidden_state

    def logits(self, edges: Mapping[str, torch.Tensor], hidden_ND: torch.Tensor) -> torch.Tensor:
        """Run HF's CausalLM head on the hidden states of some tokens: (N, D) -> logits (N, V)."""
        bound = {n: t for n, t in edges.items() if not n.startswith(self._base_prefix)}
        for alias, name in self.structure.tied.items():
            if not alias.startswith(self._base_prefix) and name in edges:
                bound[alias] = edges[name]
        bound.update(self._head_buffers)
        kwargs = {"inputs_embeds": hidden_ND.unsqueeze(0), "use_cache": False}
        return functional_call(self._head, bound, kwargs=kwargs).logits[0]

    def call_layer(
        self,
        index: int,
        variant: Variant,
        weights: Mapping[str, torch.Tensor],
        args: Any,
        kwargs: Any,
        mask_N: torch.Tensor | None = None,
    ) -> Any:
        """Run HF's code of layer `index` with `weights` (layout names) and the layer's buffers bound for this call.

        Args:
            mask_N: 0 where a token is padding, in fp32; only for layers in `watched`. The result is (output, `Routed`) then.
        """
        code, bound = self._code[self.groups[index]], {**weights, **self._layer_buffers[index]}
        if code.compiled and not self._runs_eager:
            return code(variant, bound, args, kwargs, mask_N)
        # Eager: the layer's own module, whose code may depend on its index.
        layer = (self._layers_in_chunks if variant in CHUNKABLE else self.layers)[index]
        return code.eager(layer, bound, args, kwargs, mask_N)

    def leaves(self, views: Mapping[str, torch.Tensor], prefix: str, requires_grad: bool) -> dict[str, torch.Tensor]:
        """Autograd leaves over a slot's views, in the dtype HF keeps each parameter in; without gradients if frozen."""
        leaves = {}
        for name, view in views.items():
            leaf = view.detach()
            if prefix + name in self.fp32_names:
                leaf = leaf.float()
            leaves[name] = leaf.requires_grad_(requires_grad and prefix + name not in self.structure.frozen)
        return leaves

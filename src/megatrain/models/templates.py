"""Layer code: HF's own layer modules as functions of their weights, compiled once per group of equal layers.

[Note: template groups]
Layers that differ in their weights alone run the same code: equal class, tensor names, shapes and types, and equal plain
attributes in all their submodules (`layer_idx` aside). The first layer of a group is its template; the others' weights and
buffers are bound to it. So a model of 100 layers compiles one or two of them.

[Note: variants]
A compiled function exists in several variants, each with a code object of its own, because the compiler's cache belongs to
the code object and its memory budget is no part of the cache's guards:
    forward    without gradients, for layers that will be recomputed
    recompute  with gradients, everything saved: its backward follows at once
    keep       with gradients, everything saved, until the backward
    selective  with gradients, until the backward, but only as much as the activation memory budget (0..1) allows: the compiler
               computes the rest again
    keep_attention  with gradients, until the backward, but of all that is saved only the layer's input and what its attention
               gave
    keep_mlp   the same with the products of the MLP's matrices instead of the attention

[Note: one part kept]
`keep_attention` and `keep_mlp` keep the results of some operations by name and compute all others again, which is what
`torch.utils.checkpoint` calls a selective policy. Where a layer is compiled, the compiler cuts its graph by that policy, and its
backward computes again no more than it reads: attention runs once. An eager layer does it in two calls: its forward writes
the results down (`Kept.written`), and the recompute before its backward reads them instead of running the operation
(`Kept.read`).
"""

from __future__ import annotations

import collections
import functools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

logger = logging.getLogger(__name__)

Variant = Literal["forward", "recompute", "keep", "selective", "keep_attention", "keep_mlp"]
PARTS: tuple[Variant, ...] = ("keep_attention", "keep_mlp")
"""Variants that keep one part of a layer. See [Note: one part kept]."""
IN_CHUNKS: tuple[Variant, ...] = ("forward", "recompute", "keep_attention")
"""Variants whose MLP saves nothing that its backward reads, so that it may be computed in chunks of tokens."""
PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype)
NOT_CODE = {"layer_idx", "layer_index", "layer_id", "layer_number", "block_idx", "training"}
"""Attributes that number a layer or are set for all layers alike."""


def template_groups(layers: Sequence[nn.Module]) -> list[int]:
    """Group number of each layer, counted in order of first appearance. See [Note: template groups]."""
    signatures: list[tuple[Any, ...]] = []
    groups = []
    for layer in layers:
        signature = tuple(_signature(layer))
        if signature not in signatures:
            signatures.append(signature)
        groups.append(signatures.index(signature))
    return groups


def _signature(layer: nn.Module) -> Iterator[Any]:
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        yield name, tuple(tensor.shape), tensor.dtype
    for path, module in layer.named_modules():
        yield path, type(module)
        for name, value in sorted(vars(module).items()):
            if name in NOT_CODE or (name.startswith("_") and name != "_attn_implementation"):
                continue
            yield path, name, _comparable(value)


def _comparable(value: Any) -> Any:
    """A plain value by value, containers of plain values by their parts, anything else by identity."""
    if isinstance(value, PLAIN):
        return type(value).__name__, value
    if isinstance(value, tuple | list):
        return tuple(_comparable(item) for item in value)
    if isinstance(value, dict):
        return tuple((str(key), _comparable(item)) for key, item in value.items())
    if isinstance(value, functools.partial):
        return value.func, _comparable(value.args), _comparable(value.keywords)
    if isinstance(value, types.MethodType):
        return value.__func__
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        return value
    return id(value)


class Leaves(dict[str, torch.Tensor]):
    """Autograd leaves over some weights, by layout name; made once for each place of a layer's weights, and never changed.

    Attributes:
        trained: Those that need a gradient.
    """

    def __init__(self, leaves: Mapping[str, torch.Tensor]):
        super().__init__(leaves)
        self.trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}


class LayerCode:
    """The code of one template group.

    Args:
        module: The template; its own parameters are never used.
        name: For the compiler's logs.
        compiled: Compile on first use; if that fails, warn once and go on in eager mode.
        budget: Activation memory budget of the `selective` variant.
        mlp_matrices: Shapes of the MLP's matrices, which the `mlp` variant tells its products by.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        compiled: bool,
        budget: float = 1.0,
        mlp_matrices: frozenset[tuple[int, ...]] = frozenset(),
    ):
        self.module = module
        self._in_chunks = module
        self._mlp_matrices = mlp_matrices
        self._name = name
        self._budget = budget
        self._compiled: dict[Variant, Any] | None = {} if compiled else None

    @property
    def compiled(self) -> bool:
        return self._compiled is not None

    def __call__(
        self, variant: Variant, bound: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the layer with `bound` in place of its parameters and buffers (all names)."""
        module = self._in_chunks if variant in IN_CHUNKS else self.module
        if self._compiled is None:
            return functional_call(module, dict(bound), args, kwargs)
        run = self._compiled.get(variant)
        if run is None:
            stays = self.kept_operations(variant) if variant in PARTS else None
            run = self._compiled[variant] = torch.compile(
                _fresh_function(module, f"{self._name}_{variant}", stays), dynamic=False
            )
        try:
            if variant != "selective":  # the configuration costs more to set than a small layer to launch
                return run(dict(bound), args, kwargs)
            with functorch_config.patch(activation_memory_budget=self._budget):
                return run(dict(bound), args, kwargs)
        except _compiler_errors() as error:
            logger.warning(
                "%s cannot be compiled (%s); asked for compile: auto, going on in eager mode",
                type(self.module).__name__,
                type(error).__name__,
            )
            logger.debug("the compiler said", exc_info=error)
            self._compiled = None
            return functional_call(module, dict(bound), args, kwargs)

    def compute_in_chunks(self, module: nn.Module) -> None:
        """From the next call on, compute with this module in the variants that can have an MLP in chunks of tokens.

        What was compiled for them is forgotten: a size of chunks is a constant of the code, and of one code object the compiler
        makes a handful of versions at most.
        """
        self._in_chunks = module
        if self._compiled is not None:
            self._compiled = {variant: run for variant, run in self._compiled.items() if variant not in IN_CHUNKS}

    def kept_operations(self, variant: Variant) -> Stays:
        """What the layer keeps in a variant that keeps one part of it."""
        return kept_operations(variant, self._mlp_matrices)


def _compiler_errors() -> tuple[type[BaseException], ...]:
    """What the compiler raises when it cannot do a function, as opposed to what the function itself raises."""
    import torch._dynamo.exc
    import torch._inductor.exc

    return torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError


def _fresh_function(module: nn.Module, name: str, stays: Stays | None) -> Any:
    """A function with a code object of its own; see [Note: variants]. With `stays`, of all it computes it keeps that."""

    def run(bound: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(module, bound, args, kwargs)

    def run_part(bound: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return checkpoint(functional_call, module, bound, args, kwargs, use_reentrant=False, context_fn=contexts)

    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, stays))  # type: ignore[arg-type]
    plain = run if stays is None else run_part
    code = plain.__code__.replace(co_name=name)
    return types.FunctionType(code, plain.__globals__, name, plain.__defaults__, plain.__closure__)


# ---------------------------------------------------------------------------------------------------------------------
# One part kept

_aten = torch.ops.aten
ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    flex_attention_hop,
)
"""Fused attention: forward kernels that save their output and the logarithms of the sums for the backward."""


Stays = Callable[[Any, tuple[Any, ...]], bool]
"""Whether the results of an operation with these arguments are kept."""


def kept_operations(variant: Variant, mlp_matrices: frozenset[tuple[int, ...]]) -> Stays:
    """What a layer of a variant in `PARTS` keeps. See [Note: one part kept]."""
    if variant == "keep_attention":
        return lambda operation, args: operation in ATTENTION
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return lambda operation, args: operation in products and tuple(sorted(args[-1].shape)) in mlp_matrices


def _policy(stays: Stays, ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if stays(operation, args) else CheckpointPolicy.PREFER_RECOMPUTE


class Kept:
    """What an eager layer keeps of one part between its forward and its backward. See [Note: one part kept]."""

    def __init__(self, stays: Stays):
        self._stays = stays
        self._results: collections.deque[Any] = collections.deque()

    def written(self) -> TorchDispatchMode:
        """The layer's forward runs inside, without gradients."""
        return _Intercepted(self._stays, self._write)

    def read(self) -> TorchDispatchMode:
        """The layer's recompute runs inside, once: nothing that was written down is computed again."""
        return _Intercepted(self._stays, self._read)

    def _write(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = operation(*args, **kwargs)
        self._results.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, results))
        return results

    def _read(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._results.popleft()


class _Intercepted(TorchDispatchMode):
    """Inside, operations that stay go through `instead`."""

    def __init__(self, stays: Stays, instead: Callable[..., Any]):
        super().__init__()
        self._stays, self._instead = stays, instead

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._stays(func, args):
            return self._instead(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

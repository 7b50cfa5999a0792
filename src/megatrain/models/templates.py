"""Layer code: HF's own layer modules as functions of their weights, compiled once per group of equal layers.

[Note: template groups]
Layers that differ only in their weights run the same code: they have the same class, tensor names, shapes and dtypes, and the
same plain attributes in all submodules (except `layer_idx`). The first layer of a group is its template; the weights and buffers
of the others are bound to it. So a model of 100 layers compiles one or two templates.

[Note: variants]
Each compiled function has several variants with separate code objects, because the compiler caches by code object and does not
guard on the activation memory budget:
    forward         without gradients, for layers that will be recomputed
    recompute       with gradients; saves all activations for the backward that follows at once
    keep            with gradients; saves all activations until the backward
    selective       with gradients; until the backward, saves as much as the activation memory budget (0..1) allows, and the
                    compiler recomputes the rest
    keep_attention  with gradients; until the backward, saves only the layer's input and the results of attention
    keep_mlp        the same with the products of the MLP's matrices instead of attention

[Note: keeping one part]
`keep_attention` and `keep_mlp` keep the results of certain operations and recompute all others, as a selective policy of
`torch.utils.checkpoint` does. For a compiled layer, the compiler partitions the graph by that policy, and the backward recomputes
only what it reads: attention runs once. An eager layer takes two calls: its forward records the results
(`KeptResults.recording`), and the recompute before its backward reads them instead of running the operations
(`KeptResults.replaying`).
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

from megatrain.models.routers import RouterProbe, record

logger = logging.getLogger(__name__)

Variant = Literal["forward", "recompute", "keep", "selective", "keep_attention", "keep_mlp"]
KEEP_ONE_PART: tuple[Variant, ...] = ("keep_attention", "keep_mlp")
"""See [Note: keeping one part]."""
CHUNKABLE: tuple[Variant, ...] = ("forward", "recompute", "keep_attention")
"""Variants that save nothing inside the MLP for a later backward, so the MLP may be computed in chunks of tokens."""
PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype)
NOT_CODE = {"layer_idx", "layer_index", "layer_id", "layer_number", "block_idx", "training"}
"""Attributes that number a layer, or that are set for all layers alike."""


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
    """What to compare: plain values by value, containers by their items, functions by definition, anything else by identity."""
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
    """Autograd leaves over a layer's weights, by layout name; made once for each place of the weights, and never changed."""

    def __init__(self, leaves: Mapping[str, torch.Tensor]):
        super().__init__(leaves)
        self.trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}


class LayerCode:
    """The code of one template group; the template's own parameters are never used.

    Args:
        name: For the compiler's logs.
        compiled: Compile on first use; if that fails, warn once and run eager.
        budget: Activation memory budget of the `selective` variant.
        mlp_matrices: Shapes of the MLP's matrices, by which `keep_mlp` recognizes their products.
        probe: Sees what the layer's routers do; None: it has none.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        compiled: bool,
        budget: float = 1.0,
        mlp_matrices: frozenset[tuple[int, ...]] = frozenset(),
        probe: RouterProbe | None = None,
    ):
        self.module = module
        self._in_chunks = module
        self._mlp_matrices = mlp_matrices
        self._name = name
        self._budget = budget
        self._probe = probe
        self._compiled: dict[tuple[Variant, bool], Any] | None = {} if compiled else None
        """By variant, and whether routers are recorded."""

    @property
    def compiled(self) -> bool:
        return self._compiled is not None

    def __call__(
        self,
        variant: Variant,
        bound: Mapping[str, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mask_N: torch.Tensor | None = None,
    ) -> Any:
        """Run the layer with `bound` in place of its parameters and buffers (all names).

        With a `mask_N` (0 where a token is padding) the result is (output, `Routed`).
        """
        module = self._in_chunks if variant in CHUNKABLE else self.module
        if self._compiled is None:
            return self.eager(module, bound, args, kwargs, mask_N)
        probe = None if mask_N is None else self._probe
        run = self._compiled.get((variant, probe is not None))
        if run is None:
            rule = self.keep_rule(variant) if variant in KEEP_ONE_PART else None
            function = _fresh_function(module, f"{self._name}_{variant}", rule, probe)
            run = self._compiled[variant, probe is not None] = torch.compile(function, dynamic=False)
        given = (dict(bound), args, kwargs) if mask_N is None else (dict(bound), args, kwargs, mask_N)
        try:
            if variant != "selective":  # setting the config takes longer than launching a small layer
                return run(*given)
            with functorch_config.patch(activation_memory_budget=self._budget):
                return run(*given)
        except _compiler_errors() as error:
            kind, problem = type(self.module).__name__, type(error).__name__
            logger.warning("%s cannot be compiled (%s); compile: auto runs it eager", kind, problem)
            logger.debug("compiler error", exc_info=error)
            self._compiled = None
            return self.eager(module, bound, args, kwargs, mask_N)

    def eager(
        self,
        module: nn.Module,
        bound: Mapping[str, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mask_N: torch.Tensor | None,
    ) -> Any:
        """`__call__` without compiled code, by this module: the template, or another layer of the group."""
        call = (module, dict(bound), args, kwargs)
        if mask_N is None:
            return functional_call(*call)
        assert self._probe is not None
        return record(self._probe, mask_N, functional_call, call)

    def compute_in_chunks(self, module: nn.Module) -> None:
        """From the next call on, use this module for the variants in `CHUNKABLE`.

        Their compiled functions are dropped: the chunk size is a constant in the code, and the compiler makes only a few versions
        of one code object.
        """
        self._in_chunks = module
        if self._compiled is not None:
            self._compiled = {key: run for key, run in self._compiled.items() if key[0] not in CHUNKABLE}

    def keep_rule(self, variant: Variant) -> KeepRule:
        return keep_rule(variant, self._mlp_matrices)


def _compiler_errors() -> tuple[type[BaseException], ...]:
    """Errors of the compiler itself, as opposed to errors of the function that it compiles."""
    import torch._dynamo.exc
    import torch._inductor.exc

    return torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError


def _fresh_function(module: nn.Module, name: str, rule: KeepRule | None, probe: RouterProbe | None) -> Any:
    """A function with a separate code object, see [Note: variants].

    Args:
        rule: If given, it keeps only the results of that rule.
        probe: If given, it takes a mask of tokens, too, and returns (output, what the routers did).
    """

    def run(bound: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(module, bound, args, kwargs)

    def run_recording(
        bound: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], mask_N: torch.Tensor
    ) -> Any:
        probe.begin()  # type: ignore[union-attr]
        output = functional_call(module, bound, args, kwargs)
        return output, probe.end(mask_N)  # type: ignore[union-attr]

    plain = run if probe is None else run_recording

    def run_keeping(*given: Any) -> Any:
        return checkpoint(plain, *given, use_reentrant=False, context_fn=contexts)

    contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, rule))  # type: ignore[arg-type]
    chosen = plain if rule is None else run_keeping
    code = chosen.__code__.replace(co_name=name)
    return types.FunctionType(code, chosen.__globals__, name, chosen.__defaults__, chosen.__closure__)


# ------------------------------------------------------------------ keeping one part

_aten = torch.ops.aten
ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    flex_attention_hop,
)
"""Fused attention: forward kernels that save their output and the log-sum-exp for the backward."""

KeepRule = Callable[[Any, tuple[Any, ...]], bool]
"""(operation, arguments) -> whether its results are kept."""


def keep_rule(variant: Variant, mlp_matrices: frozenset[tuple[int, ...]]) -> KeepRule:
    """The rule of a variant in `KEEP_ONE_PART`."""
    if variant == "keep_attention":
        return lambda operation, args: operation in ATTENTION
    products = (_aten.mm.default, _aten.addmm.default)
    return lambda operation, args: operation in products and tuple(sorted(args[-1].shape)) in mlp_matrices


def _policy(rule: KeepRule, ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if rule(operation, args) else CheckpointPolicy.PREFER_RECOMPUTE


class KeptResults:
    """Results that an eager layer keeps from its forward to its recompute. See [Note: keeping one part]."""

    def __init__(self, rule: KeepRule):
        self._rule = rule
        self._results: collections.deque[Any] = collections.deque()

    def recording(self) -> TorchDispatchMode:
        """Context for the layer's forward, without gradients."""
        return _Intercept(self._rule, self._record)

    def replaying(self) -> TorchDispatchMode:
        """Context for the layer's recompute, once: recorded operations do not run again."""
        return _Intercept(self._rule, lambda operation, args, kwargs: self._results.popleft())

    def _record(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = operation(*args, **kwargs)
        self._results.append(pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, results))
        return results


class _Intercept(TorchDispatchMode):
    """Inside, calls `instead` for the operations that the rule keeps."""

    def __init__(self, rule: KeepRule, instead: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]):
        super().__init__()
        self._rule, self._instead = rule, instead

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._rule(func, args):
            return self._instead(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

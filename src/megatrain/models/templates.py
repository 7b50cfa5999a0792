"""Layer code: HF's own layer modules as functions of their weights, compiled once per group of equal layers.

[Note: template groups]
Layers that differ in their weights alone run the same code: equal class, tensor names, shapes and types, and equal plain
attributes in all their submodules (`layer_idx` aside). The first layer of a group is its template; the others' weights and
buffers are bound to it. So a model of 100 layers compiles one or two of them.

[Note: variants]
A compiled function exists in up to four variants, each with a code object of its own, because the compiler's cache belongs to
the code object and its memory budget is no part of the cache's guards:
    forward    without gradients, for layers that will be recomputed
    recompute  with gradients, everything saved: its backward follows at once
    keep       with gradients, everything saved, until the backward
    selective  with gradients, until the backward, but only as much as the activation memory budget (0..1) allows: the compiler
               computes the rest again
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.func import functional_call

logger = logging.getLogger(__name__)

Variant = Literal["forward", "recompute", "keep", "selective"]
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


class LayerCode:
    """The code of one template group.

    Args:
        module: The template; its own parameters are never used.
        name: For the compiler's logs.
        compiled: Compile on first use; if that fails, warn once and go on in eager mode.
        budget: Activation memory budget of the `selective` variant.
    """

    def __init__(self, module: nn.Module, name: str, compiled: bool, budget: float = 1.0):
        self.module = module
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
        if self._compiled is None:
            return functional_call(self.module, dict(bound), args, kwargs)
        run = self._compiled.get(variant)
        if run is None:
            run = self._compiled[variant] = torch.compile(
                _fresh_function(self.module, f"{self._name}_{variant}"), dynamic=False
            )
        try:
            with functorch_config.patch(activation_memory_budget=self._budget if variant == "selective" else 1.0):
                return run(dict(bound), args, kwargs)
        except _compiler_errors() as error:
            logger.warning(
                "%s cannot be compiled (%s); asked for compile: auto, going on in eager mode",
                type(self.module).__name__,
                type(error).__name__,
            )
            logger.debug("the compiler said", exc_info=error)
            self._compiled = None
            return functional_call(self.module, dict(bound), args, kwargs)


def _compiler_errors() -> tuple[type[BaseException], ...]:
    """What the compiler raises when it cannot do a function, as opposed to what the function itself raises."""
    import torch._dynamo.exc
    import torch._inductor.exc

    return torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError


def _fresh_function(module: nn.Module, name: str) -> Any:
    """A function with a code object of its own. See [Note: variants]."""

    def run(bound: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(module, bound, args, kwargs)

    code = run.__code__.replace(co_name=name)
    return types.FunctionType(code, run.__globals__, name, run.__defaults__, run.__closure__)

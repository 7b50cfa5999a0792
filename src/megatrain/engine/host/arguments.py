"""Arguments and results of a layer call as flat lists, and back.

A layer is called for every visit with the same handful of tuples and dicts. torch's pytree, made for any type, takes longer for
them than for the kernels of a small layer; so the plain containers are walked here, and pytree is asked for all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree


class Branch(NamedTuple):
    """A tuple, list or dict. `keys` are a dict's, in its order; `parts` are the forms of what it holds."""

    kind: type
    keys: tuple[Any, ...]
    parts: list[Form]


Form = Branch | pytree.TreeSpec | None
"""How a value is put together again from its leaves; None is a leaf itself."""

_LEAVES = frozenset((torch.Tensor, BlockMask, type(None), bool, int, float, str))


def tree_flatten(value: Any, leaves: list[Any]) -> Form:
    """Append the leaves of `value` to `leaves`, in order. Returns its form."""
    kind = type(value)
    if kind in _LEAVES:
        leaves.append(value)
        return None
    if kind is tuple or kind is list:
        return Branch(kind, (), [tree_flatten(part, leaves) for part in value])
    if kind is dict:
        return Branch(kind, tuple(value), [tree_flatten(part, leaves) for part in value.values()])
    found, spec = pytree.tree_flatten(value)
    leaves += found
    return spec


def tree_unflatten(form: Form, leaves: Iterator[Any]) -> Any:
    """The value of this form with the next leaves. New containers, so that a layer may change its own."""
    if form is None:
        return next(leaves)
    if isinstance(form, pytree.TreeSpec):
        return pytree.tree_unflatten(list(islice(leaves, form.num_leaves)), form)
    parts = [tree_unflatten(part, leaves) for part in form.parts]
    if form.kind is dict:
        return dict(zip(form.keys, parts, strict=True))
    return parts if form.kind is list else tuple(parts)


@dataclass
class Arguments:
    """Arguments of a layer call as a flat list. `leaves` holds tensors and anything else."""

    leaves: list[Any]
    form: Form

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        leaves: list[Any] = []
        return cls(leaves, tree_flatten((args, kwargs), leaves))

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_unflatten(self.form, iter(leaves))

"""Which parameters are trained. The others are frozen: they keep the bits that they were loaded with."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from megatrain.errors import UserError


@dataclass(frozen=True)
class Trainable:
    """The parameters to train, by regular expressions that are searched in their full Hugging Face names.

    Attributes:
        freeze: Parameters that are not trained.
        only: If given, no other parameters are trained.
    """

    freeze: Sequence[str] = ()
    only: Sequence[str] = ()

    def apply(self, model: nn.Module) -> None:
        """Set `requires_grad` of the model's parameters. A tied parameter is chosen by any of its names.

        Raises:
            UserError: A pattern is no regular expression or matches no parameter, or nothing is left to train.
        """
        named = list(model.named_parameters(remove_duplicate=False))
        names = [name for name, _ in named]
        frozen = {id(p) for name, p in named if name in _matching("train.freeze", self.freeze, names)}
        if self.only:
            chosen = _matching("train.only", self.only, names)
            wanted = {id(p) for name, p in named if name in chosen}
            frozen |= {id(p) for _, p in named} - wanted
        for _, parameter in named:
            if id(parameter) in frozen:
                parameter.requires_grad_(False)
        if not any(parameter.requires_grad for _, parameter in named):
            where = "train.freeze" if self.freeze else "train.only"
            raise UserError("every parameter of the model is frozen", where, "leave at least one parameter to train")


def _matching(where: str, patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    """The names in which at least one of the patterns is found."""
    found: set[str] = set()
    for number, pattern in enumerate(patterns):
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise UserError(f"{pattern!r} is no regular expression: {error}", f"{where}.{number}") from error
        matched = {name for name in names if compiled.search(name)}
        if not matched:
            near = difflib.get_close_matches(pattern, names, n=2, cutoff=0.0)
            raise UserError(
                f"{pattern!r} matches no parameter of the model",
                f"{where}.{number}",
                f"names are like {', '.join(near)}",
            )
        found |= matched
    return found

"""What the engines have alike: counters of steps, the checks of what a step is given and has found, closing."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch

from megatrain.engine import batches
from megatrain.errors import EngineClosed, UserError
from megatrain.optim.adamw import AdamW


class EngineBase(ABC):
    """An engine's surface, as far as it is the same whatever computes a step.

    Args:
        optim: AdamW's hyper-parameters.
        seed: Of initialisation and dropout.

    Attributes:
        step: Calls of `train_step`, skipped ones included.
        updates: Updates applied to the moments: AdamW's step.
        config: Of the model.
    """

    config: Any

    def __init__(self, optim: AdamW | None, seed: int):
        self.optim = optim or AdamW()
        self.seed = seed
        self.step = 0
        self.updates = 0
        self._closed = False

    @abstractmethod
    def close(self) -> None:
        """Give all memory back. A closed engine refuses every further call."""

    def prepare_save(self, buffer_bytes: int | None = None) -> None:  # noqa: B027  an engine need not
        """A save in the background is some seconds away, and will get this `buffer_bytes`: time to make memory for its copies
        ready, for an engine that keeps such. Returns at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed")

    def _checked(self, batch: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
        """The batch in the form that is computed, and its number of target tokens. See `batches.checked`."""
        self._refuse_closed()
        vocabulary = self.config.get_text_config().vocab_size
        return batches.checked(batch, vocabulary, batches.most_positions(self.config))


def check_learning_rate(learning_rate: float | None) -> None:
    """Raise a UserError for what is no learning rate; None is the optimizer's own."""
    if learning_rate is not None and not (isinstance(learning_rate, int | float) and 0 <= learning_rate < math.inf):
        raise UserError(f"learning_rate = {learning_rate!r} is not a number of at least 0", "train_step")


def skip_reason(loss: float, norm: float) -> str | None:
    """The finite guard: why an update with this loss and this gradient norm is skipped; None where it is not."""
    if not math.isfinite(loss):
        return "loss is not finite"
    return None if math.isfinite(norm) else "gradient norm is not finite"

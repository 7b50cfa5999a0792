"""An engine that only counts, for tests of the training loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.async_save import SaveProgress
from megatrain.checkpoint.files import FolderWriter
from megatrain.checkpoint.format import FORMAT_NAME, FORMAT_VERSION
from megatrain.metrics.record import PipelineRecord


@dataclass
class Result:
    loss: float | None
    grad_norm: float | None
    tokens: int
    skipped: str | None = None
    seconds: dict[str, float] = field(default_factory=lambda: {"forward": 0.1})
    pipeline: PipelineRecord | None = None


@dataclass
class Evaluated:
    loss_sum: float
    tokens: int


class Saved:
    """A save that has ended."""

    def done(self) -> bool:
        return True

    def progress(self) -> SaveProgress:
        return SaveProgress(1, 1, 1.0, 0.0, 0, 0.0)


class CountingEngine:
    """Its one weight moves with each step; its loss depends on the weight and on every token of the batch."""

    def __init__(
        self, on_step: Callable[[int], Result | None] = lambda step: None, on_eval: Callable[[], None] = lambda: None
    ):
        self.weight, self.step = 1.0, 0
        self.on_step, self.on_eval = on_step, on_eval
        self.eval_rows: list[int] = []

    def train_step(self, batch: dict[str, torch.Tensor], learning_rate: float) -> Result:
        self.step += 1
        replaced = self.on_step(self.step)
        if replaced is not None:
            return replaced
        ids, labels = batch["input_ids"], batch["labels"]
        tokens = int((labels[:, 1:] != -100).sum())
        order = torch.arange(1, ids.numel() + 1, dtype=torch.float64).view(ids.shape)
        loss = self.weight * float((ids * order).sum()) / 1e6
        self.weight -= learning_rate * loss
        return Result(loss, loss / 2, tokens)

    def eval_step(self, batch: dict[str, torch.Tensor]) -> Evaluated:
        self.on_eval()
        self.eval_rows.append(len(batch["input_ids"]))
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        return Evaluated(self.weight * tokens, tokens)

    def save(
        self,
        directory: Path,
        extra: dict[str, Any] | None = None,
        *,
        then: Callable[[SaveProgress], object] = lambda progress: None,
        **_: Any,
    ) -> Saved:
        with FolderWriter(directory) as writer:
            state = {"weight": self.weight, "step": self.step, "extra": extra or {}}
            writer.write_json("state.json", {"state": state})
            writer.commit({"format": FORMAT_NAME, "version": FORMAT_VERSION, "step": self.step})
        then(Saved().progress())
        return Saved()

    def prepare_save(self, buffer_bytes: int | None = None) -> None:
        pass

    def cancel_save(self) -> None:
        pass

    def wait_saved(self) -> None:
        pass

    def load(self, directory: Path, *, wait: bool = True) -> dict[str, Any]:
        state = json.loads((directory / "state.json").read_text())["state"]
        self.weight, self.step = state["weight"], state["step"]
        return state["extra"]

    def memory(self) -> dict[str, int]:
        return {"device_peak": 0}

"""A trivial engine, for tests of the training loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.async_save import SaveProgress
from megatrain.checkpoint.files import FolderWriter
from megatrain.checkpoint.format import FORMAT_NAME, FORMAT_VERSION
from megatrain.engine.base import Batch, Engine, EvalResult, StepResult


class Saved:
    """A finished save."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def progress(self) -> SaveProgress:
        return SaveProgress(1, 1, 1.0, 0.0, 0, 0.0)

    def result(self, timeout_s: float | None = None) -> SaveProgress:
        return self.progress()


class CountingEngine(Engine):
    """Its only weight changes in each step; its loss depends on the weight and on every token of the batch."""

    def __init__(
        self,
        on_step: Callable[[int], StepResult | None] = lambda step: None,
        on_eval: Callable[[], None] = lambda: None,
    ):
        super().__init__(None, None, seed=0)
        self.weight = 1.0
        self.on_step, self.on_eval = on_step, on_eval
        self.eval_rows: list[int] = []

    def train_step(self, batch: Batch, learning_rate: float | None = None) -> StepResult:
        assert learning_rate is not None
        self.step += 1
        replaced = self.on_step(self.step)
        if replaced is not None:
            return replaced
        ids, labels = batch["input_ids"], batch["labels"]
        tokens = int((labels[:, 1:] != -100).sum())
        order = torch.arange(1, ids.numel() + 1, dtype=torch.float64).view(ids.shape)
        loss = self.weight * float((ids * order).sum()) / 1e6
        self.weight -= learning_rate * loss
        return StepResult(loss, loss / 2, tokens, seconds={"forward": 0.1})

    def backward(self, batch: Batch) -> StepResult:
        raise NotImplementedError

    def eval_step(self, batch: Batch) -> EvalResult:
        self.on_eval()
        self.eval_rows.append(len(batch["input_ids"]))
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        return EvalResult(self.weight * tokens, tokens)

    def sequence_logprobs(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError

    def save(
        self,
        folder: str | Path,
        extra: dict[str, Any] | None = None,
        *,
        then: Callable[[SaveProgress], object] = lambda progress: None,
        **_: Any,
    ) -> Saved:
        with FolderWriter(Path(folder)) as writer:
            state = {"weight": self.weight, "step": self.step, "extra": extra or {}}
            writer.write_json("state.json", {"state": state})
            writer.commit({"format": FORMAT_NAME, "version": FORMAT_VERSION, "step": self.step})
        then(Saved().progress())
        return Saved()

    def cancel_save(self) -> None:
        pass

    def wait_saved(self) -> None:
        pass

    def load(self, folder: str | Path, *, wait: bool = True, convert_states: bool = False) -> dict[str, Any]:
        state = json.loads((Path(folder) / "state.json").read_text())["state"]
        self.weight, self.step = state["weight"], state["step"]
        return state["extra"]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.tensor(self.weight)

    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError

    def memory(self) -> dict[str, int]:
        return {"device_peak": 0}

    def close(self) -> None:
        pass

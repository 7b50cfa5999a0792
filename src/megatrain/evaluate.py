"""Loss and perplexity over a whole held-out set."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatrain.check import make_engine, prepare_eval
from megatrain.checkpoint.reader import is_complete
from megatrain.config.schema import RunConfig
from megatrain.data.loader import StepLoader
from megatrain.errors import UserError, counted
from megatrain.metrics.logger import RunLogger, quiet_libraries

if TYPE_CHECKING:
    import torch

    from megatrain.data.rows import PackedRows


class EvalEngine(Protocol):
    """What an evaluation needs of an engine; its result has `loss_sum` and `tokens`."""

    def eval_step(self, batch: dict[str, torch.Tensor]) -> Any: ...


@dataclass(frozen=True)
class EvalSummary:
    """Cross entropy over all target tokens of a set.

    Attributes:
        loss: Mean over the target tokens [nats]; None if the set has none.
        tokens: Target tokens.
        seconds: Wall time.
    """

    loss: float | None
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float | None:
        if self.loss is None:
            return None
        # exp leaves the range of a double near 709; an untrained model can be worse
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(
    engine: EvalEngine, rows: PackedRows, *, rows_per_batch: int, stop: Callable[[], bool] = lambda: False
) -> EvalSummary | None:
    """Sum the loss over all rows, each once, in order. Training state is not touched, and no logits are kept.

    Args:
        rows: The held-out rows.
        rows_per_batch: Rows given to the engine at once.
        stop: Asked before each batch.

    Returns:
        The summary, or None if `stop` became true on the way.
    """
    start = time.perf_counter()
    loader = StepLoader(rows, rows_per_batch, seed=0, shuffle=False)
    loss_sum, tokens = 0.0, 0
    for step in range(loader.steps_per_epoch):
        if stop():
            return None
        result = engine.eval_step(loader.batch(step))
        loss_sum += result.loss_sum
        tokens += result.tokens
    return EvalSummary(loss_sum / tokens if tokens else None, tokens, time.perf_counter() - start)


def evaluate_run(run: RunConfig, *, checkpoint: Path | None = None) -> EvalSummary:
    """Evaluate a run's model, or a checkpoint of it, on its held-out data (`data.val`), and print the result.

    Args:
        run: The config; see `load_config`.
        checkpoint: A checkpoint (its exact fp32 weights are used), or any Hugging Face folder; None: `model.path`.

    Raises:
        UserError: Something given is wrong; all problems at once.
    """
    quiet_libraries()
    if run.engine == "mesh":
        raise UserError("evaluates within a run only", "engine: mesh", "evaluate with the host engine: --engine host")
    if checkpoint is not None:
        model = run.model.model_copy(update={"path": str(checkpoint), "init": "pretrained"})
        run = run.model_copy(update={"model": model})
    with RunLogger() as log:
        folder, rows = prepare_eval(run, log=log.info)
        with make_engine(run, folder, for_training=False) as engine:
            if checkpoint is not None and is_complete(checkpoint):
                engine.load(checkpoint)
            found = evaluate(engine, rows, rows_per_batch=run.rows_per_step)
        assert found is not None, "an evaluation that nobody stops ends"
        loss = "n/a" if found.loss is None else f"{found.loss:.4f}, perplexity {found.perplexity:.4g}"
        log.info(f"validation loss {loss} over {counted(found.tokens, 'token')}, {found.seconds:.1f} s")
    return found

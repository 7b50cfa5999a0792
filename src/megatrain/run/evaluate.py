"""Loss and perplexity over a whole held-out set."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint.reader import is_complete, latest_complete
from megatrain.config.schema import RunConfig
from megatrain.data.rows import PackedRows
from megatrain.engine.base import Engine
from megatrain.errors import UserError
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.run.engine_factory import make_engine
from megatrain.run.folder import RunFolder
from megatrain.run.prepare import prepare_eval
from megatrain.units import counted


@dataclass(frozen=True)
class SourceLoss:
    """Cross entropy over the target tokens of one source.

    Attributes:
        name: Path of the source.
        loss_sum: Sum over the target tokens [nats].
        tokens: Target tokens.
    """

    name: str
    loss_sum: float
    tokens: int

    @property
    def loss(self) -> float | None:
        """Mean over the target tokens [nats]; None if there are none."""
        return _mean(self.loss_sum, self.tokens)


@dataclass(frozen=True)
class EvalSummary:
    """Cross entropy over all target tokens of a validation set.

    Attributes:
        sources: Cross entropy of each source, in config order.
        seconds: Wall time.
    """

    sources: tuple[SourceLoss, ...]
    seconds: float

    @property
    def tokens(self) -> int:
        """Target tokens."""
        return sum(source.tokens for source in self.sources)

    @property
    def loss(self) -> float | None:
        """Mean over the target tokens [nats]; None if the set has none."""
        return _mean(sum(source.loss_sum for source in self.sources), self.tokens)


def evaluate(
    engine: Engine, rows: PackedRows, *, rows_per_batch: int, stop: Callable[[], bool] = lambda: False
) -> EvalSummary | None:
    """Sum the loss over all rows, each once, source by source. Does not touch the training state.

    Args:
        engine: The engine.
        rows: The held-out rows.
        rows_per_batch: Rows given to the engine at once.
        stop: Called before each batch; true aborts the evaluation.

    Returns:
        The summary; None if it was aborted.
    """
    start = time.perf_counter()
    sources: list[SourceLoss] = []
    first = 0
    for group in rows.groups:
        end = first + len(group)
        loss_sum, tokens = 0.0, 0
        for begin in range(first, end, rows_per_batch):
            if stop():
                return None
            result = engine.eval_step(rows.batch(range(begin, min(begin + rows_per_batch, end))))
            loss_sum += result.loss_sum
            tokens += result.tokens
        sources.append(SourceLoss(group.name, loss_sum, tokens))
        first = end
    return EvalSummary(tuple(sources), time.perf_counter() - start)


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
        raise UserError(
            "only evaluates during training", "engine: mesh", "evaluate with the host engine: --engine host"
        )
    if checkpoint is not None:
        model = run.model.model_copy(update={"path": str(checkpoint), "init": "pretrained"})
        run = run.model_copy(update={"model": model})
    with RunLogger() as log:
        if checkpoint is None and latest_complete(RunFolder(run.run.dir).checkpoints) is not None:
            log.info(f"evaluating {run.model.path}; for the trained model: megatrain eval {run.run.dir}")
        folder, rows = prepare_eval(run, log=log.info)
        with make_engine(run, folder, for_training=False) as engine:
            if checkpoint is not None and is_complete(checkpoint):
                engine.load(checkpoint)
            found = evaluate(engine, rows, rows_per_batch=run.rows_per_step)
        assert found is not None, "nothing aborts this evaluation"
        if len(found.sources) > 1:
            for source in found.sources:
                log.info(f"  {source.name}: loss {_in_words(source.loss)} over {counted(source.tokens, 'token')}")
        log.info(
            f"validation loss {_in_words(found.loss)} over {counted(found.tokens, 'token')}, {found.seconds:.1f} s"
        )
    return found


def _mean(loss_sum: float, tokens: int) -> float | None:
    return loss_sum / tokens if tokens else None


def _in_words(loss: float | None) -> str:
    if loss is None:
        return "n/a"
    # exp leaves the range of a double near 709; an untrained model can be worse
    return f"{loss:.4f}, perplexity {math.exp(loss) if loss < 700 else math.inf:.4g}"

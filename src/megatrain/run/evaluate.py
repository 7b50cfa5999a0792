"""Loss and perplexity over a whole held-out set."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatrain.checkpoint.reader import latest_complete
from megatrain.config.schema import RunConfig
from megatrain.data.rows import PackedRows
from megatrain.engine.base import Engine
from megatrain.errors import UserError
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.run.coordinator import coordinated
from megatrain.run.engine_factory import Shapes, make_engine
from megatrain.run.folder import RunFolder
from megatrain.run.prepare import prepare_eval
from megatrain.units import counted


@dataclass(frozen=True)
class CrossEntropySum:
    """Cross entropy over some target tokens.

    Attributes:
        loss_sum: Sum over the target tokens [nats].
        tokens: Target tokens.
    """

    loss_sum: float
    tokens: int

    @property
    def loss(self) -> float | None:
        """Mean over the target tokens [nats]; None if there are none."""
        return self.loss_sum / self.tokens if self.tokens else None

    def __str__(self) -> str:
        over = f"over {counted(self.tokens, 'token')}"
        if self.loss is None:
            return f"n/a {over}"
        # exp leaves the range of a double near 709; an untrained model can be worse
        return f"{self.loss:.4f}, perplexity {math.exp(self.loss) if self.loss < 700 else math.inf:.4g} {over}"


@dataclass(frozen=True)
class EvalSummary(CrossEntropySum):
    """Cross entropy over a validation set.

    Attributes:
        sources: (path, its part) of each source, in config order.
        seconds: Wall time.
    """

    sources: Sequence[tuple[str, CrossEntropySum]]
    seconds: float


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
    sources: list[tuple[str, CrossEntropySum]] = []
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
        sources.append((group.name, CrossEntropySum(loss_sum, tokens)))
        first = end
    loss_sum, tokens = sum(part.loss_sum for _, part in sources), sum(part.tokens for _, part in sources)
    return EvalSummary(loss_sum, tokens, sources, time.perf_counter() - start)


def evaluate_run(run: RunConfig, *, checkpoint: Path | None = None) -> EvalSummary:
    """Evaluate a run's model, or a checkpoint of it, on its held-out data (`data.val`), and print the result.

    Where there are several ranks, every one calls this.

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
    with coordinated(run) as coordinator, RunLogger(quiet=not coordinator.is_main) as log:
        if checkpoint is None and latest_complete(RunFolder(run.run.dir).checkpoints) is not None:
            log.info(f"evaluating {run.model.path}; for the trained model: megatrain eval {run.run.dir}")
        folder, rows = coordinator.in_turn(lambda: prepare_eval(run, log=log.info))
        shapes = Shapes.of(run.rows_per_step, None, rows)
        with make_engine(run, folder, for_training=False, shapes=shapes, watch=coordinator.section) as engine:
            found = evaluate(engine, rows, rows_per_batch=run.rows_per_step)
        coordinator.finish()
        assert found is not None, "nothing aborts this evaluation"
        if len(found.sources) > 1:
            for name, part in found.sources:
                log.info(f"  {name}: loss {part}")
        log.info(f"validation loss {found}, {found.seconds:.1f} s")
    return found

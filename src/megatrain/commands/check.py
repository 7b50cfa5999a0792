"""`megatrain check`: everything that can be known about a run before it trains."""

from __future__ import annotations

from collections.abc import Collection

from megatrain.config.schema import ChangeName, RunConfig
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.run.prepare import prepare


def check(run: RunConfig, *, resume: str | None = None, allow_changes: Collection[ChangeName] = ()) -> None:
    """Run every check that `train` (with the same arguments) runs before the first step, and print the findings.

    Raises:
        UserError, PlanRefused: What would stop `train`, all problems in one error.
    """
    quiet_libraries()
    with RunLogger() as log:
        prepare(run, resume=resume, allow_changes=allow_changes, log=log.info)
        log.info("all checks passed")

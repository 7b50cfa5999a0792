"""What a run goes on with when a rank has run out of device memory: less memory, more time, the same result.

[Note: out of memory]
One rank's step fails, and the others wait for it in collectives that it cannot enter again. So its process ends with the exit
code of a hang, and before that counts one up in RUN/denser. torchrun starts all again; they go on from the newest checkpoint
with the setting that many rungs down the ladder. Whoever wants to keep it writes it into the config; whoever does not removes
the file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.engine.mesh.layout import Layout

FILE = "denser"


@dataclass(frozen=True)
class Setting:
    """A rung of the ladder.

    Attributes:
        layout: Resolved.
        recompute: Whether layers are computed again in the backward.
        key: What to write into the config for it; empty for the first.
    """

    layout: Layout
    recompute: bool
    key: str = ""


def ladder(layout: Layout, recompute: bool, rows: int) -> list[Setting]:
    """From what is configured to what needs least memory.

    Args:
        layout: Resolved.
        recompute: As configured.
        rows: Of a step.
    """
    rungs = [Setting(layout, recompute)]
    if not recompute:
        rungs.append(Setting(layout, True, "activations.policy: recompute"))
    last, pieces = rungs[-1], layout.pieces
    while 2 * pieces <= rows // layout.data:
        pieces *= 2
        key = f"parallel.microbatches: {pieces}"
        rungs.append(Setting(dataclasses.replace(layout, microbatches=pieces), last.recompute, key))
    return rungs


def times_out_of_memory(folder: Path) -> int:
    """How often the run in `folder` has run out of memory."""
    file = folder / FILE
    return int(file.read_text()) if file.exists() else 0


def note_out_of_memory(folder: Path, times: int) -> None:
    """It has now, `times` in all."""
    temporary = folder / f"{FILE}.new"
    temporary.write_text(f"{times}\n")
    temporary.replace(folder / FILE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it is, or was raised because of it: torch's pipeline stages wrap what a forward raises."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__
    return False

"""What a run goes on with when a rank has run out of device memory: less memory, more time, the same result.

[Note: out of memory]
One rank's step fails, and the others wait for it in collectives that it cannot enter again. So its process ends with the exit
code of a hang, and before that counts one up in RUN/denser. torchrun starts all again; they go on from the newest checkpoint
with that many reductions of the plan (`MeshPlan.reduced`). Whoever wants to keep it writes it into the config; whoever does not
removes the file.
"""

from __future__ import annotations

from pathlib import Path

import torch

FILE = "denser"


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

"""Recovery of the mesh engine from running out of device memory: restart with less memory, more time and the same result.

[Note: out of memory]
When a step fails on one rank, the others wait for it in collectives that it cannot enter again. So its process ends with the exit
code of a hang, after it has counted up RUN/denser. torchrun restarts all ranks; they resume from the newest checkpoint with the
plan reduced that many times (`MeshPlan.reduced`). To keep the reduced plan, write its line into the config; to undo it, remove
the file.
"""

from __future__ import annotations

from pathlib import Path

import torch

FILE = "denser"


def times_out_of_memory(folder: Path) -> int:
    """How often the run in `folder` has run out of device memory."""
    file = folder / FILE
    return int(file.read_text()) if file.exists() else 0


def note_out_of_memory(folder: Path, times: int) -> None:
    """Record that the run has run out of device memory, `times` times in all."""
    temporary = folder / f"{FILE}.new"
    temporary.write_text(f"{times}\n")
    temporary.replace(folder / FILE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error is, or was caused by, an out-of-memory error: torch's pipeline stages wrap errors of a forward."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__
    return False

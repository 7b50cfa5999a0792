"""Who writes what of a mesh checkpoint: one rank of each host, whole units each.

[Note: rounds]
Units are handed out by size, the largest first, each to the writer that has least so far. The n-th units of all writers are
the n-th round: they are gathered at the same time, and written while the next round is gathered.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megatrain.checkpoint.files import FilesWriter
from megatrain.checkpoint.writer import UnitFiles, UnitsPlan, write_unit
from megatrain.host_memory.store import UnitPlanes
from megatrain.models.structure import Unit


def first_of_hosts(group: dist.ProcessGroup) -> list[int]:
    """The first rank of every host, as torchrun says; rank 0 alone without it. Collective over the group of all ranks."""
    firsts = [False] * dist.get_world_size()
    me = dist.get_rank()
    dist.all_gather_object(firsts, me == 0 or os.environ.get("LOCAL_RANK") == "0", group=group)
    return [rank for rank, first in enumerate(firsts) if first]


def shares(sizes: Mapping[str, int], writers: Sequence[int]) -> dict[int, list[str]]:
    """Writer -> its units in the order in which it gets them. See [Note: rounds]."""
    found: dict[int, list[str]] = {writer: [] for writer in writers}
    loads = dict.fromkeys(writers, 0)
    for name in by_size(sizes):
        writer = min(loads, key=loads.__getitem__)
        found[writer].append(name)
        loads[writer] += sizes[name]
    return found


def by_size(sizes: Mapping[str, int]) -> list[str]:
    """Largest first; equal ones in the order given."""
    return sorted(sizes, key=lambda name: -sizes[name])


def rounds(sizes: Mapping[str, int], writers: Sequence[int]) -> list[dict[int, str]]:
    """The units of each round by writer. See [Note: rounds]."""
    found = shares(sizes, writers)
    count = max(len(units) for units in found.values())
    return [
        {writer: units[number] for writer, units in found.items() if number < len(units)} for number in range(count)
    ]


class UnitWriter:
    """Writes the units that one rank gets, in a thread, while the rank takes part in gathering the following ones.

    It holds one unit: `put` waits for the one before.

    Args:
        part: Where to.
        plan: How.
    """

    def __init__(self, part: FilesWriter, plan: UnitsPlan):
        self.part, self._plan = part, plan
        self.written: dict[str, UnitFiles] = {}
        self._error: BaseException | None = None
        self._units: queue.Queue[tuple[Unit, UnitPlanes] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="mesh-save-write", daemon=True)
        self._thread.start()

    def put(self, unit: Unit, planes: UnitPlanes) -> None:
        """Have a unit written, when the one before is. The planes are not to change any more. What fails `check` says."""
        self._units.join()
        self._units.put((unit, planes))

    def check(self) -> None:
        """Raise what has gone wrong so far."""
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Return when all units are on the disk and were read back. Raises what went wrong."""
        self._units.join()
        self.check()
        self.part.settle()

    def end(self) -> None:
        """Wait for the unit in progress, and close the files. Nothing is written behind it."""
        if self._thread.is_alive():
            self._units.put(None)
            self._thread.join()
        self.part.close_files()

    def _run(self) -> None:
        while (item := self._units.get()) is not None:
            try:
                if self._error is None:
                    self.written[item[0].name] = write_unit(self.part, *item, self._plan)
            except BaseException as error:  # noqa: BLE001  `check` raises it, whatever it is
                self._error = error
            del item  # the planes are gone before the next unit's are made
            self._units.task_done()

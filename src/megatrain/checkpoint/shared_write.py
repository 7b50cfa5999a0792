"""One checkpoint folder, written by several ranks whose threads agree at every step.

[Note: a shared save]
Each rank has a part of the state and a thread that saves. Units are gathered on the ranks that write, one per host, over a gloo
group that only saves use, so that no message of training gets in between. They are gathered in rounds ([Note: rounds]) and
written by `write_unit`, as one process does it, into one folder that rank 0 has made ([Note: several writers] in files.py). A
writer holds two gathered units at most: one being written and one being gathered. The ranks learn that the save has ended when
every file is synced, was read back and compared, and the folder has its name.

Before every round, and before every step of the end, all ranks agree to continue: an error anywhere (a full disk, a failed
read) ends the save everywhere. An error in the middle of a round is reported at its end, so that no rank waits for a message
that never comes. Rank 0 removes the folder when the other writers have closed their files.

A writer that does not see the folder, because the hosts share no file system, makes rank 0 write everything, with a warning.

[Note: rounds]
Units are assigned by size, largest first, each to the writer that has the fewest parameters so far. The n-th units of all
writers form round n: they are gathered at the same time, and written while the next round is gathered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatrain.checkpoint.async_save import SaveCancelled, SaveSource
from megatrain.checkpoint.files import FilesWriter, FolderWriter
from megatrain.checkpoint.format import MARKER_FILE, FileRecord
from megatrain.checkpoint.writer import SavePlan, UnitFiles, UnitsPlan, write_begin, write_end, write_unit
from megatrain.errors import Aftermath, UserError
from megatrain.host_memory.store import UnitPlanes
from megatrain.models.structure import Unit

logger = logging.getLogger(__name__)

T = TypeVar("T")
Share = tuple[dict[str, FileRecord], dict[str, UnitFiles]]
"""What a writer reports to rank 0: the records of its files, and its units."""


class SharedWrite:
    """The part of one save that its ranks do together; see [Note: a shared save]. Used in the save's thread.

    Args:
        source: What this rank saves; counts bytes and knows whether the save was cancelled.
        plan: The whole save on rank 0; elsewhere, how its units are written.
        writers: The ranks that write, rank 0 among them.
        group: gloo, for saves alone.
    """

    def __init__(self, source: SaveSource, plan: UnitsPlan, writers: Sequence[int], group: dist.ProcessGroup):
        self._source, self._plan, self._group = source, plan, group
        self._writers = list(writers)
        """The ranks that write; rank 0 alone once it turns out that one of them does not see the folder."""
        self._units = {unit.name: unit for unit in plan.units}
        self.sizes = {name: unit.layout.numel for name, unit in self._units.items()}
        self._stopped = False  # nothing may be written any more
        self._writer: UnitWriter | None = None
        self._written_elsewhere = 0
        self._own_share = 1.0

    def run(
        self,
        room: Callable[[Mapping[int, str]], UnitPlanes | None],
        gather: Callable[[Mapping[int, str], UnitPlanes | None], object],
    ) -> None:
        """Write the checkpoint. Collective.

        Args:
            room: Memory for the unit that this rank receives in a round (writer -> unit), None if it receives none. Raises why
                this rank cannot continue, if so.
            gather: Sends this rank's parts of a round's units, and fills `room`'s planes. Collective; must not raise.
        """
        with contextlib.ExitStack() as stack:  # closes writers and folder, whatever happens
            folder = self.together(lambda: self._begin(stack))
            part = self._join(folder, stack)
            self._own_share = self._share_of(dist.get_rank()) or 1.0
            stack.callback(self._stop_writing)
            if part is not None:
                self._writer = UnitWriter(part, self._plan)
            for units in rounds(self.sizes, self._writers):
                whole = self.together(lambda units=units: self._checked(room, units))
                gather(units, whole)
                if self._writer is not None and whole is not None:
                    self._writer.put(self._units[whole.name], whole)
            self.together(lambda: self._settle(room))
            reported = self._gathered_shares()
            self.together(lambda: self._end(folder, reported))

    def count(self) -> None:
        """Raise SaveCancelled where nothing may be written any more. Called after each piece written."""
        if self._stopped:
            raise SaveCancelled(f"{self._source.directory}: another rank failed")

    def written_by_all(self, ended: bool) -> int:
        """Until the end, assume that the other writers are as far with their shares as this one. 0 except on rank 0."""
        if ended:
            return self._source.written_bytes + self._written_elsewhere
        return min(self._source.total_bytes, int(self._source.written_bytes / self._own_share))

    def _checked(
        self, room: Callable[[Mapping[int, str]], UnitPlanes | None], units: Mapping[int, str]
    ) -> UnitPlanes | None:
        self._source.check_cancelled()
        if self._writer is not None:
            self._writer.check()
        return room(units)

    def _settle(self, room: Callable[[Mapping[int, str]], UnitPlanes | None]) -> None:
        self._checked(room, {})
        if self._writer is not None:
            self._writer.settle()

    def _begin(self, stack: contextlib.ExitStack) -> FolderWriter | None:
        """On rank 0, make the folder."""
        if not isinstance(self._plan, SavePlan):
            return None
        folder = stack.enter_context(FolderWriter(self._source.directory, self._source.count))
        write_begin(folder, self._plan)
        return folder

    def _join(self, folder: FolderWriter | None, stack: contextlib.ExitStack) -> FilesWriter | None:
        """Agree on who writes: all writers if each of them sees rank 0's folder, else rank 0. Returns this rank's writer."""
        said: list[Any] = [None]
        if folder is not None:
            said = [(folder.temp.name, (folder.temp / MARKER_FILE).read_text(encoding="utf-8"))]
        dist.broadcast_object_list(said, src=0, group=self._group)
        temp = self._source.directory.with_name(said[0][0])
        me = dist.get_rank()
        blind = first_rank(me in self._writers and not _is_marked(temp, said[0][1]), self._group)
        if blind is not None:
            self._writers = [0]
            if folder is not None:
                logger.warning(
                    "rank %d does not see %s: the hosts share no file system there, so rank 0 alone writes the checkpoint",
                    blind, temp,
                )  # fmt: skip
        if folder is not None or me not in self._writers:
            return folder
        return stack.enter_context(FilesWriter(temp, self._source.directory, self._source.count))

    def _share_of(self, rank: int) -> float:
        """Fraction of the parameters that a rank writes."""
        own = shares(self.sizes, self._writers).get(rank, [])
        return sum(self.sizes[name] for name in own) / max(1, sum(self.sizes.values()))

    def _gathered_shares(self) -> list[Share | None]:
        """On rank 0, what each rank has written."""
        me = dist.get_rank()
        mine: Share | None = None
        if self._writer is not None:
            mine = self._writer.part.records, self._writer.written
        found: list[Share | None] = [None] * dist.get_world_size()
        dist.gather_object(mine, found if me == 0 else None, dst=0, group=self._group)
        return found

    def _end(self, folder: FolderWriter | None, reported: Sequence[Share | None]) -> None:
        """On rank 0, finish the folder."""
        if folder is None or not isinstance(self._plan, SavePlan):
            return
        written: dict[str, UnitFiles] = {}
        for rank, share in enumerate(reported):
            if share is not None:
                records, units = share
                written |= units
                if rank != 0:
                    folder.take_over(records)
        write_end(folder, self._plan, written)
        self._source.read_back_s = folder.read_back_s

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and continue if it succeeded everywhere. Collective.

        Raises:
            This rank's error, or a UserError that names the first rank that has one. Nothing is being written then.
        """
        done: list[T] = []
        error: BaseException | None = None
        try:
            done.append(work())
        except BaseException as problem:  # noqa: BLE001  raised below, once all ranks know
            error = problem
        written = self._source.written_bytes
        words = torch.tensor([int(error is not None), written])
        dist.all_reduce(words, group=self._group)
        failed, written_by_all = words.tolist()
        self._written_elsewhere = written_by_all - written
        if failed:
            self._stop_writing()
            first = first_rank(error is not None, self._group)
            assert first is not None
            raise error or failed_on(first, self._source.directory)
        return done[0]

    def _stop_writing(self) -> None:
        self._stopped = True
        if self._writer is not None:
            self._writer.end()


def plan_together(make: Callable[[], UnitsPlan], directory: Path, group: dist.ProcessGroup) -> UnitsPlan:
    """This rank's plan of a save. If making it fails on one rank, it fails on all. Collective."""
    plan: UnitsPlan | None = None
    try:
        plan = make()
    finally:
        failed = first_rank(plan is None, group)
    if failed is not None or plan is None:
        raise failed_on(failed or 0, directory)
    return plan


class UnitWriter:
    """Writes the units that one rank receives, in a thread, while the rank takes part in gathering the next ones.

    It holds one unit at a time: `put` waits for the one before.

    Args:
        part: Where to write.
        plan: How to write.
    """

    def __init__(self, part: FilesWriter, plan: UnitsPlan):
        self.part, self._plan = part, plan
        self.written: dict[str, UnitFiles] = {}
        self._error: BaseException | None = None
        self._units: queue.Queue[tuple[Unit, UnitPlanes] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="checkpoint-write", daemon=True)
        self._thread.start()

    def put(self, unit: Unit, planes: UnitPlanes) -> None:
        """Queue a unit, whose planes must not change any more, once the one before is written. `check` raises its errors."""
        self._units.join()
        self._units.put((unit, planes))

    def check(self) -> None:
        """Raise the first error so far."""
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Return when all units are on disk and were read back. Raises the first error."""
        self._units.join()
        self.check()
        self.part.settle()

    def end(self) -> None:
        """Wait for the unit in progress, then close the files. Nothing can be written afterwards."""
        if self._thread.is_alive():
            self._units.put(None)
            self._thread.join()
        self.part.close_files()

    def _run(self) -> None:
        while (item := self._units.get()) is not None:
            try:
                if self._error is None:
                    self.written[item[0].name] = write_unit(self.part, *item, self._plan)
            except BaseException as error:  # noqa: BLE001  `check` raises it
                self._error = error
            del item  # frees the planes before the next unit's are allocated
            self._units.task_done()


def first_of_hosts(group: dist.ProcessGroup) -> list[int]:
    """The first rank of every host, by torchrun's LOCAL_RANK; rank 0 alone without it. Collective over all ranks."""
    firsts = [False] * dist.get_world_size()
    me = dist.get_rank()
    dist.all_gather_object(firsts, me == 0 or os.environ.get("LOCAL_RANK") == "0", group=group)
    return [rank for rank, first in enumerate(firsts) if first]


def by_size(sizes: Mapping[str, int]) -> list[str]:
    """Largest first; equal ones in the order given."""
    return sorted(sizes, key=lambda name: -sizes[name])


def shares(sizes: Mapping[str, int], writers: Sequence[int]) -> dict[int, list[str]]:
    """Writer -> its units, in the order in which it receives them. See [Note: rounds]."""
    found: dict[int, list[str]] = {writer: [] for writer in writers}
    loads = dict.fromkeys(writers, 0)
    for name in by_size(sizes):
        writer = min(loads, key=loads.__getitem__)
        found[writer].append(name)
        loads[writer] += sizes[name]
    return found


def rounds(sizes: Mapping[str, int], writers: Sequence[int]) -> list[dict[int, str]]:
    """For each round, writer -> its unit. See [Note: rounds]."""
    found = shares(sizes, writers)
    count = max(len(units) for units in found.values())
    return [
        {writer: units[number] for writer, units in found.items() if number < len(units)} for number in range(count)
    ]


def first_rank(says_so: bool, group: dist.ProcessGroup) -> int | None:
    """The first rank that says so, None if none does. Collective."""
    world = dist.get_world_size()
    word = torch.tensor([dist.get_rank() if says_so else world])
    dist.all_reduce(word, op=dist.ReduceOp.MIN, group=group)
    return None if word.item() == world else int(word.item())


def _is_marked(temp: Path, marker: str) -> bool:
    """Whether this is the folder that rank 0 has made."""
    try:
        return (temp / MARKER_FILE).read_text(encoding="utf-8") == marker
    except OSError:
        return False


def failed_on(rank: int, directory: Path) -> UserError:
    return Aftermath(f"rank {rank} could not write the checkpoint", str(directory), f"see rank {rank}'s error")

"""Host threads that update units in the background.

[Note: order of background work]
A job is one pass over a unit's planes: an update, an addition of gradients, a sum of squares. It is cut into pieces. Threads take
pieces in the order in which jobs were submitted, from jobs that are ready:
- their data has arrived: `after`, if given, has returned;
- the previous job of the *same unit* has ended.
So two jobs of one unit never overlap and keep their order, while pieces of later units fill threads that an earlier unit leaves
idle.

    BLOCKED --(data arrived, unit's earlier job ended)--> READY --(last piece ended)--> ENDED
       \\____________________(the unit failed)___________________________________________/

One dedicated thread calls the `after` callables one at a time, in the order of submission, so a wait for the device never keeps a
piece from running. They should release the GIL while they wait; make a CUDA event with `blocking=True`, or its wait burns a core.

[Note: failed units]
An exception in `after` or in a piece goes to the job's future, with its traceback, as soon as no thread works on the job. The
unit's planes may then be half updated, so every later job of that unit fails with the same exception. Other units continue.

A job holds its tensors until it has ended; nothing here holds them longer.
"""

from __future__ import annotations

import functools
import heapq
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megatrain.errors import EngineClosed
from megatrain.host_memory.layout import FlatLayout, elements_per_value
from megatrain.host_memory.store import UnitPlanes
from megatrain.metrics.spans import Row, Span
from megatrain.optim import kernels
from megatrain.optim.spec import OptimizerSpec, Segment, StepCoefficients

# Pieces start at multiples of this: whole pages of every plane, so that two threads never write to one cache line.
PIECE_ALIGN = 4096
# Longest piece: short enough to even out threads that lose their core for a while, long enough (milliseconds) that taking a
# piece, which needs the GIL, does not slow down the thread that drives the device.
PIECE_MOST = 1 << 22
# Pieces of a sum of squares do not depend on the number of threads; their sums are added exactly.
SUM_PIECE = 1 << 20

After = Callable[[], object]


class _State(Enum):
    BLOCKED = "waits for its data or for earlier work of its unit"
    READY = "its pieces are handed out"
    ENDED = "its future is set"


@dataclass(eq=False)
class _Job:
    """One pass over a unit; see [Note: order of background work]. Guarded by the updater's lock."""

    number: int
    unit: str
    pieces: Sequence[tuple[int, int]]
    run_piece: Callable[[int, int], object]
    finish: Callable[[], Any]
    after: After | None
    row: Row | None = None
    size: int = 0  # parameters
    started_s: float = 0.0  # when its first piece was taken
    future: Future[Any] = field(default_factory=Future)
    state: _State = _State.BLOCKED
    waits_for_data: bool = False
    waits_for_unit: bool = False
    handed_out: int = 0
    running: int = 0
    error: BaseException | None = None  # of `after` or of a piece, until the job ends with it
    successor: _Job | None = None  # the next job of the same unit

    def __lt__(self, other: _Job) -> bool:
        return self.number < other.number

    @property
    def exhausted(self) -> bool:
        """Whether no further piece will be handed out."""
        return self.error is not None or self.handed_out == len(self.pieces)

    def retire(self) -> _Job | None:
        """-> ENDED. Return the unit's next job, if any.

        Drops the calls, which hold the tensors; idle threads may hold the job itself for a while.
        """
        self.state = _State.ENDED
        self.run_piece = self.finish = _nothing
        self.after = None
        successor, self.successor = self.successor, None
        return successor


class CpuUpdater:
    """A fixed pool of threads (`adamw-0`, `adamw-1`, ...) that works on units; see [Note: order of background work].

    All `submit*` methods return at once. `result()` of their future waits for the job and raises its error. The threads call
    `record` with every pass over a unit that has ended.
    """

    def __init__(self, threads: int, record: Callable[[Span], None] = lambda span: None):
        assert threads >= 1, threads
        self.threads = threads
        self.record = record
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # a job became ready, or the last one ended while closing
        self._ready: list[_Job] = []  # heap by job number
        self._last_of_unit: dict[str, _Job] = {}  # jobs that have not ended
        self._failed_units: dict[str, BaseException] = {}
        self._jobs_submitted = 0
        self._jobs_open = 0
        self._closing = False
        self._arrivals: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # Daemon threads: a process whose owner forgot close() still exits.
        self._pool = [
            threading.Thread(target=self._work_on_pieces, name=f"adamw-{i}", daemon=True) for i in range(threads)
        ]
        self._pool.append(threading.Thread(target=self._wait_for_arrivals, name="adamw-arrivals", daemon=True))
        for thread in self._pool:
            thread.start()

    def submit_update(
        self,
        unit: str,
        optim: OptimizerSpec,
        planes: UnitPlanes,
        grad: Tensor,
        segments: Sequence[Segment],
        coefficients: StepCoefficients,
        after: After | None = None,
    ) -> Future[None]:
        """One optimizer step on a unit's planes, in place. `grad` (bf16 or fp32, (N,)) is unchanged; `after` waits for it."""
        _check_planes(unit, optim, planes, grad)
        assert all(0 <= s.start <= s.end <= grad.numel() for s in segments), (unit, segments, grad.numel())
        kernel = optim.host_kernel(planes, grad)
        parts = [(segment.start, segment.end, coefficients.scalars(segment)) for segment in segments]

        def update(start: int, end: int) -> None:
            for segment_start, segment_end, scalars in parts:
                first, last = max(start, segment_start), min(end, segment_end)
                if first < last:
                    kernel(first, last, scalars)

        size = grad.numel()
        return self.submit(unit, cut_pieces(size, self.threads), update, after=after, row="adamw", size=size)

    def submit_compilation(self, optim: OptimizerSpec, split: bool, gradient: torch.dtype) -> Future[None]:
        """Compile the kernel of `submit_update` ahead of the first update, and of the forward that waits for it."""

        def compile_kernel(start: int, end: int) -> None:
            # numba compiles for the types of the arguments; no element is touched.
            whole = torch.promote_types(gradient, torch.float32)
            dtypes = {"hi": torch.bfloat16, "lo": torch.int16} if split else {"hi": whole}
            planes = {kind: torch.empty(0, dtype=dtype) for kind, dtype in {**dtypes, **optim.state_dtypes}.items()}
            nothing = UnitPlanes.of("kernels", FlatLayout((), 0), planes)
            kernel = optim.host_kernel(nothing, torch.empty(0, dtype=gradient))
            kernel(start, end, optim.coefficients(1).scalars(Segment(0, 0, 0.0, 1.0)))

        return self.submit("kernels", [(0, 0)], compile_kernel)

    def submit_add(
        self, unit: str, plane: Tensor, slab: Tensor, first: bool, after: After | None = None
    ) -> Future[None]:
        """Add a gradient slab (bf16 or fp32, (N,)) to a unit's fp32 gradient plane, or overwrite the plane with the `first`.

        `after` waits until the slab has arrived. The slab may be reused when the future is done.
        """
        assert plane.dtype in (torch.float32, torch.float64), plane.dtype
        assert slab.dtype in (torch.bfloat16, plane.dtype), slab.dtype
        assert plane.numel() == slab.numel(), (unit, plane.numel(), slab.numel())
        plane_array, slab_array = kernels.bits_view(plane), kernels.bits_view(slab)
        kernel = kernels.set_gradient if first else kernels.add_gradient
        add = functools.partial(kernel, plane_array, slab_array)
        size = plane.numel()
        return self.submit(unit, cut_pieces(size, self.threads), add, after=after, row="add", size=size)

    def submit_sumsq(self, unit: str, grad: Tensor, after: After | None = None) -> Future[float]:
        """Sum of the squares of a gradient (bf16 or fp32, (N,)), in fp64. It is finite exactly if every element is."""
        assert grad.dtype in (torch.bfloat16, torch.float32, torch.float64), grad.dtype
        array = kernels.bits_view(grad)
        pieces = [(start, min(start + SUM_PIECE, array.size)) for start in range(0, array.size, SUM_PIECE)]
        sums = [0.0] * len(pieces)

        def add_up(start: int, end: int) -> None:
            sums[start // SUM_PIECE] = kernels.sum_of_squares(array, start, end)

        finish = functools.partial(math.fsum, sums)
        return self.submit(unit, pieces, add_up, finish=finish, after=after, row="norm", size=array.size)

    def submit(
        self,
        unit: str,
        pieces: Sequence[tuple[int, int]],
        run_piece: Callable[[int, int], object],
        *,
        finish: Callable[[], Any] = lambda: None,
        after: After | None = None,
        row: Row | None = None,
        size: int = 0,
    ) -> Future[Any]:
        """Any pass over a unit.

        Args:
            pieces: (start, end) arguments of `run_piece`; at least one.
            run_piece: Called once per piece, by several threads at once. Should release the GIL.
            finish: Called after the last piece; returns the future's result.
            after: Blocks until the data has arrived; called once.
            row, size: Row that records the pass, if any, and the parameters that it names.
        """
        assert pieces, f"{unit}: a job without pieces"
        with self._lock:
            if self._closing:
                raise EngineClosed("the optimizer threads are closed")
            job = _Job(self._jobs_submitted, unit, pieces, run_piece, finish, after, row, size)
            job.future.set_running_or_notify_cancel()  # a waiter can no longer cancel it
            self._jobs_submitted += 1
            failure = self._failed_units.get(unit)
            if failure is None:
                self._jobs_open += 1
                self._enqueue(job)
        if failure is not None:
            job.future.set_exception(failure)
        return job.future

    def close(self) -> None:
        """Wait for all submitted work and join the threads. Raises nothing; a second call does nothing."""
        with self._work:
            if not self._closing:
                self._closing = True
                self._arrivals.put(None)
                self._work.notify_all()
        for thread in self._pool:
            thread.join()

    def __enter__(self) -> CpuUpdater:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _enqueue(self, job: _Job) -> None:
        """Under the lock. Record what a new job waits for."""
        predecessor = self._last_of_unit.get(job.unit)
        if predecessor is not None:
            predecessor.successor = job
            job.waits_for_unit = True
        self._last_of_unit[job.unit] = job
        if job.after is not None:
            job.waits_for_data = True
            self._arrivals.put(job)
        self._check_ready(job)

    def _check_ready(self, job: _Job) -> None:
        """Under the lock. BLOCKED -> READY if the job waits for nothing."""
        assert job.state is _State.BLOCKED, job.state
        if not job.waits_for_data and not job.waits_for_unit:
            job.state = _State.READY
            heapq.heappush(self._ready, job)
            self._work.notify(min(len(job.pieces), self.threads))

    def _wait_for_arrivals(self) -> None:
        """The arrivals thread."""
        while (job := self._arrivals.get()) is not None:
            self._wait_for_arrival(job)

    def _wait_for_arrival(self, job: _Job) -> None:
        after = job.after
        if after is None:  # the job has ended: its unit failed
            return
        error = _error_of(after)
        with self._lock:
            if job.state is _State.ENDED:
                return
            if error is None:
                job.waits_for_data = False
                self._check_ready(job)
                return
            if job.waits_for_unit:  # threads still work on the unit; `_end` of that job ends this one too
                job.error = error
                return
        self._end(job, None, error)

    def _work_on_pieces(self) -> None:
        """A worker thread."""
        while (work := self._take_piece()) is not None:
            job, piece = work
            self._piece_ended(job, _error_of(job.run_piece, *piece))

    def _take_piece(self) -> tuple[_Job, tuple[int, int]] | None:
        """Wait for a piece of the earliest ready job. None when the updater is closing and all work has ended."""
        with self._work:
            while True:
                while self._ready and self._ready[0].exhausted:
                    heapq.heappop(self._ready)
                if self._ready:
                    job = self._ready[0]
                    piece = job.pieces[job.handed_out]
                    if job.handed_out == 0:
                        job.started_s = time.perf_counter()
                    job.handed_out += 1
                    job.running += 1
                    return job, piece
                if self._closing and self._jobs_open == 0:
                    return None
                self._work.wait()

    def _piece_ended(self, job: _Job, error: BaseException | None) -> None:
        with self._lock:
            job.running -= 1
            if job.error is None:
                job.error = error
            if job.running or not job.exhausted:
                return
        # This thread ran the job's last piece, so it alone ends the job.
        if job.row is not None:
            self.record(Span(job.row, job.unit, job.started_s, time.perf_counter(), job.size))
        result: list[Any] = []
        error = job.error
        if error is None:
            error = _error_of(lambda: result.append(job.finish()))
        self._end(job, result[0] if result else None, error)

    def _end(self, job: _Job, result: Any, error: BaseException | None) -> None:
        """-> ENDED, for the job and, if it failed, for all later jobs of its unit. See [Note: failed units]."""
        with self._lock:
            ended = [(job.future, error)]
            following = job.retire()
            while following is not None:
                if error is None:
                    error = following.error
                if error is None:
                    following.waits_for_unit = False
                    self._check_ready(following)
                    break
                ended.append((following.future, error))
                following = following.retire()
            else:
                del self._last_of_unit[job.unit]
            if error is not None:
                self._failed_units[job.unit] = error
            self._jobs_open -= len(ended)
            if self._jobs_open == 0 and self._closing:
                self._work.notify_all()
        # Outside the lock: futures run their callbacks here.
        for future, failure in ended:
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)


def cut_pieces(numel: int, threads: int) -> list[tuple[int, int]]:
    """[0, numel) as one (start, end) per thread, or more if these would be longer than `PIECE_MOST`."""
    share = -(-numel // threads)
    length = max(min(-(-share // PIECE_ALIGN) * PIECE_ALIGN, PIECE_MOST), PIECE_ALIGN)
    return [(start, min(start + length, numel)) for start in range(0, numel, length)]


def _check_planes(unit: str, optim: OptimizerSpec, planes: UnitPlanes, grad: Tensor) -> None:
    lo = [] if planes.lo is None else [planes.lo]
    full = [plane for kind, plane in planes.states.items() if elements_per_value(kind) == 1]
    sizes = {plane.numel() for plane in (*lo, *full, grad)}
    assert sizes == {planes.trained_numel}, f"{unit}: planes and gradient differ in length: {sizes}"
    masters = ([torch.bfloat16, torch.int16],) if lo else ([torch.float32], [torch.float64])
    assert [plane.dtype for plane in (planes.hi, *lo)] in masters, (unit, planes.hi.dtype)
    states = {name: plane.dtype for name, plane in planes.states.items()}
    assert states == optim.state_dtypes, (unit, states, optim.state_dtypes)
    assert grad.dtype in (torch.bfloat16, torch.float32, torch.float64), (unit, grad.dtype)


def _error_of(call: Callable[..., object], *args: Any) -> BaseException | None:
    """What a call raises, of any kind, or None. The waiter on the future gets it."""
    try:
        call(*args)
    except BaseException as error:  # noqa: BLE001
        return error
    return None


def _nothing(*_: Any) -> None:
    """Replaces the calls of a job that has ended."""

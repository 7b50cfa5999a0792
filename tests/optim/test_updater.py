"""Background updates: correct bits, order and overlap, and no error is lost or hangs."""

import gc
import random
import threading
import time
import traceback
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatrain.errors import EngineClosed
from megatrain.host_memory.layout import FlatLayout
from megatrain.host_memory.store import UnitPlanes, split_
from megatrain.optim import kernels
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import Segment
from megatrain.optim.updater import PIECE_ALIGN, PIECE_MOST, SUM_PIECE, CpuUpdater, cut_pieces

SOON_S = 1.0  # "within a second"
N = 3 * PIECE_ALIGN + 77
SEGMENTS = (Segment(0, 5000, 0.1, 1.0), Segment(5000, 5008, 0.0, 1.0), Segment(5008, N, 0.1, 0.5))
PIECES = [(0, 1), (1, 2), (2, 3)]


def planes_of(hi: Tensor, lo: Tensor | None) -> UnitPlanes:
    return UnitPlanes("layer.0", FlatLayout((), N), hi, lo, {"m": torch.zeros(N), "v": torch.zeros(N)})


def make_planes(seed: int, split: bool = True) -> UnitPlanes:
    master = torch.randn(N, generator=torch.Generator().manual_seed(seed))
    if not split:
        return planes_of(master, None)
    hi, lo = torch.zeros(N).bfloat16(), torch.zeros(N, dtype=torch.int16)
    split_(master, hi, lo)
    return planes_of(hi, lo)


def make_grad(seed: int, numel: int = N) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 + seed))


class Updater(CpuUpdater):
    """Keeps its futures."""

    def __init__(self, threads: int):
        super().__init__(threads)
        self.futures: list[Future[Any]] = []

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        self.futures.append(super().submit(*args, **options))
        return self.futures[-1]

    def drain(self) -> None:
        """Wait for all jobs. Raises the error of the first that failed."""
        for future in self.futures:
            future.result(10)


@pytest.fixture
def updater():
    with Updater(threads=2) as updater:
        yield updater


class Gate:
    """A call that reports its start and blocks until it is released."""

    def __init__(self) -> None:
        self.begun, self.let = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, *_: int) -> None:
        self.calls += 1
        self.begun.set()
        assert self.let.wait(10), "nobody opened the gate"


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_units_get_the_reference_bits_whatever_the_threads(threads: int, split: bool, grad_dtype: torch.dtype) -> None:
    units = {f"layer.{i}": (make_planes(i, split), make_planes(i, split)) for i in range(3)}
    with Updater(threads) as updater:
        for step in (1, 2):
            coefficients = AdamW().coefficients(step, learning_rate=1e-2, gradient_scale=0.3)
            for i, (unit, (planes, expected)) in enumerate(units.items()):
                grad = make_grad(10 * step + i).to(grad_dtype)
                updater.submit_update(unit, AdamW(), planes, grad, SEGMENTS, coefficients)
                AdamW().update_unit_(expected, grad, SEGMENTS, coefficients)
        updater.drain()
    for planes, expected in units.values():
        assert ("lo" in planes.state()) == split
        for name, plane in planes.state().items():
            assert torch.equal(plane, expected.state()[name]), name


def test_an_update_sees_the_additions_submitted_before_it(updater: Updater) -> None:
    planes, expected, plane = make_planes(0), make_planes(0), torch.full((N,), float("nan"))
    slabs = [make_grad(i).bfloat16() for i in range(4)]
    coefficients = AdamW().coefficients(1)
    for i, slab in enumerate(slabs):
        updater.submit_add("layer.0", plane, slab, first=i == 0, after=lambda: time.sleep(0.01))
    square = updater.submit_sumsq("layer.0", plane)
    done = updater.submit_update("layer.0", AdamW(), planes, plane, SEGMENTS, coefficients)
    assert done.result(10) is None
    total = slabs[0].float() + slabs[1].float() + slabs[2].float() + slabs[3].float()
    assert torch.equal(plane, total)
    assert square.result(0) == pytest.approx(total.double().square().sum().item(), rel=1e-12)
    assert expected.lo is not None
    AdamW().update_unit_(expected, total, SEGMENTS, coefficients)
    assert torch.equal(planes.hi, expected.hi)


def test_the_sum_of_squares_has_the_same_bits_whatever_the_threads() -> None:
    grad = make_grad(0, 2 * SUM_PIECE + 12345).bfloat16()
    sums = set()
    for threads in (1, 2, 3):
        with Updater(threads) as updater:
            sums |= {updater.submit_sumsq("layer.0", grad).result(10) for _ in range(3)}
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(grad.double().square().sum().item(), rel=1e-12)


def test_a_gradient_that_is_not_finite_shows_in_its_sum_and_reading_it_changes_nothing(updater: Updater) -> None:
    for bad in (float("inf"), float("-inf"), float("nan")):
        grad = make_grad(0)
        grad[N - 1] = bad
        before = grad.clone().view(torch.int32)
        assert not torch.tensor(updater.submit_sumsq("layer.0", grad).result(10)).isfinite()
        assert torch.equal(grad.view(torch.int32), before)


@given(st.integers(0, 1 << 26), st.integers(1, 64))
def test_pieces_cover_a_unit_once_and_are_neither_tiny_nor_huge(numel: int, threads: int) -> None:
    pieces = cut_pieces(numel, threads)
    assert [start for start, _ in pieces] == [0, *(end for _, end in pieces)][: len(pieces)]
    assert (pieces[-1][1] if pieces else 0) == numel
    assert all(start % PIECE_ALIGN == 0 and 0 < end - start <= PIECE_MOST for start, end in pieces)
    if numel <= threads * PIECE_MOST:
        assert len(pieces) <= threads
    if numel <= PIECE_ALIGN:
        assert len(pieces) <= 1


def test_planes_of_the_wrong_kind_are_refused_at_once(updater: Updater) -> None:
    coefficients = AdamW().coefficients(1)
    wrong = [
        (make_planes(0), make_grad(0)[:-1], SEGMENTS),
        (make_planes(0), make_grad(0).half(), SEGMENTS),
        (make_planes(0), make_grad(0), (Segment(0, N + 1, 0.0, 1.0),)),
        (planes_of(torch.zeros(N), torch.zeros(N, dtype=torch.int16)), make_grad(0), SEGMENTS),
    ]
    for planes, grad, segments in wrong:
        with pytest.raises(AssertionError):
            updater.submit_update("layer.0", AdamW(), planes, grad, segments, coefficients)
    updater.drain()


def test_pieces_of_a_later_unit_start_before_the_earlier_unit_has_ended(updater: Updater) -> None:
    slow, fast = Gate(), Gate()
    fast.let.set()
    first = updater.submit("layer.0", [(0, 1)], slow)
    second = updater.submit("layer.1", PIECES, fast)
    second.result(10)
    assert slow.begun.is_set()
    assert not first.done()
    slow.let.set()
    first.result(10)


def test_two_jobs_of_one_unit_never_overlap(updater: Updater) -> None:
    first, second = Gate(), Gate()
    second.let.set()
    futures = [updater.submit("layer.0", [(0, 1)], first), updater.submit("layer.0", [(0, 1)], second)]
    assert first.begun.wait(10)
    assert not second.begun.wait(0.05), "an idle thread began the second job of a unit whose first job runs"
    first.let.set()
    futures[1].result(10)
    assert futures[0].done()


def test_earlier_units_come_first() -> None:
    order: list[str] = []
    with Updater(threads=1) as updater:
        gate = Gate()
        updater.submit("embedding", [(0, 1)], gate)
        for unit in ("layer.0", "layer.1", "layer.2"):
            updater.submit(unit, PIECES, lambda start, end, unit=unit: order.append(f"{unit}[{start}]"))
        gate.let.set()
        updater.drain()
    assert order == [f"layer.{i}[{start}]" for i in range(3) for start, _ in PIECES]


def test_a_wait_for_one_gradient_blocks_no_thread_from_ready_work() -> None:
    with Updater(threads=1) as updater:
        arrival = Gate()
        late = updater.submit("layer.0", PIECES, lambda start, end: None, after=arrival)
        assert arrival.begun.wait(10)
        updater.submit("layer.1", PIECES, lambda start, end: None).result(10)
        assert not late.done()
        arrival.let.set()
        late.result(10)
        assert arrival.calls == 1


def test_the_wait_for_the_next_gradient_runs_beside_the_update_of_this_one() -> None:
    meet = threading.Barrier(2, timeout=10)  # breaks, and fails the jobs, if the two do not run at the same time
    with Updater(threads=1) as updater:
        updater.submit("layer.0", [(0, 1)], lambda start, end: meet.wait())
        for i in range(1, 4):
            updater.submit(f"layer.{i}", [(0, 1)], lambda start, end: meet.wait(), after=meet.wait)
        updater.submit("layer.4", [(0, 1)], lambda start, end: None, after=meet.wait)
        updater.drain()


def test_arrivals_are_awaited_once_each_in_order_on_their_own_thread(updater: Updater) -> None:
    seen = []
    for i in range(5):
        after = lambda i=i: seen.append((i, threading.current_thread().name))  # noqa: E731
        updater.submit(f"layer.{i % 2}", PIECES, lambda start, end: None, after=after)
    updater.drain()
    assert seen == [(i, "adamw-arrivals") for i in range(5)]


def test_many_jobs_of_many_units_keep_each_units_order() -> None:
    dice = random.Random(0)
    done: dict[str, list[int]] = {f"layer.{i}": [] for i in range(6)}
    expected: dict[str, list[int]] = {unit: [] for unit in done}
    with Updater(threads=4) as updater:
        for number in range(300):
            unit = dice.choice(list(done))
            expected[unit] += [number] * 3
            pause_s = dice.random() * 1e-3
            updater.submit(
                unit,
                PIECES,
                lambda start, end, unit=unit, number=number, pause_s=pause_s: (
                    time.sleep(pause_s),
                    done[unit].append(number),
                ),
                after=(lambda pause_s=pause_s: time.sleep(pause_s)) if dice.random() < 0.5 else None,
            )
        updater.drain()
    assert done == expected


def test_the_result_is_that_of_finish_after_the_last_piece(updater: Updater) -> None:
    ended: list[int] = []
    future = updater.submit("layer.0", PIECES, lambda start, end: ended.append(start), finish=lambda: sorted(ended))
    assert future.result(10) == [0, 1, 2]
    assert not future.cancel()


def fail(*_: int) -> None:
    raise ValueError("this piece is broken")


@pytest.mark.parametrize("where", ["after", "piece", "finish"])
def test_an_exception_reaches_whoever_waits_within_a_second_with_its_traceback(updater: Updater, where: str) -> None:
    calls = {"run_piece": lambda start, end: None, "finish": lambda: None, "after": None}
    calls["run_piece" if where == "piece" else where] = fail
    future = updater.submit("layer.0", PIECES, **calls)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="this piece is broken") as caught:
        future.result(SOON_S)
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_any_kind_of_exception_is_passed_on(updater: Updater) -> None:
    def stop(start: int, end: int) -> None:
        raise SystemExit("from a library")

    with pytest.raises(SystemExit, match="from a library"):
        updater.submit("layer.0", PIECES, stop).result(SOON_S)
    assert updater.submit("layer.1", PIECES, lambda start, end: None, finish=lambda: "alive").result(SOON_S) == "alive"


def test_later_work_of_a_failed_unit_fails_too_and_other_units_go_on(updater: Updater) -> None:
    touched = Gate()
    gate = Gate()

    def fail_late(start: int, end: int) -> None:
        gate(start, end)
        fail()

    first = updater.submit("layer.0", [(0, 1)], fail_late)
    chained = updater.submit("layer.0", PIECES, touched)
    waiting = updater.submit("layer.0", PIECES, touched, after=lambda: None)
    other = updater.submit("layer.1", PIECES, lambda start, end: None, finish=lambda: "alive")
    assert other.result(SOON_S) == "alive"
    gate.let.set()
    for future in (first, chained, waiting):
        with pytest.raises(ValueError, match="this piece is broken"):
            future.result(SOON_S)
    with pytest.raises(ValueError, match="this piece is broken"):
        updater.submit("layer.0", PIECES, touched).result(SOON_S)
    assert touched.calls == 0


def test_a_broken_piece_stops_the_others_and_is_reported_when_no_thread_runs_any_more() -> None:
    slow, begun = Gate(), []

    def piece(start: int, end: int) -> None:
        begun.append(start)
        if start == 0:
            slow()
        else:
            assert slow.begun.wait(10)
            fail()

    with Updater(threads=2) as updater:
        future = updater.submit("layer.0", [(i, i + 1) for i in range(10)], piece)
        assert slow.begun.wait(10)
        time.sleep(0.05)
        assert not future.done(), "a thread still writes to the unit"
        slow.let.set()
        with pytest.raises(ValueError, match="this piece is broken"):
            future.result(SOON_S)
    assert sorted(begun) == [0, 1]


def test_a_gradient_that_fails_to_arrive_does_not_affect_earlier_work(updater: Updater) -> None:
    gate, untouched = Gate(), Gate()
    first = updater.submit("layer.0", [(0, 1)], gate, finish=lambda: "whole")
    second = updater.submit("layer.0", PIECES, untouched, after=fail)
    third = updater.submit("layer.0", PIECES, untouched)
    assert gate.begun.wait(10)
    assert not second.done()
    gate.let.set()
    assert first.result(SOON_S) == "whole"
    for future in (second, third):
        with pytest.raises(ValueError, match="this piece is broken"):
            future.result(SOON_S)
    assert untouched.calls == 0


def test_close_lets_work_end_joins_and_refuses_more() -> None:
    before = set(threading.enumerate())
    updater = CpuUpdater(threads=3)
    mine = set(threading.enumerate()) - before
    assert {thread.name for thread in mine} == {"adamw-0", "adamw-1", "adamw-2", "adamw-arrivals"}
    assert all(thread.daemon for thread in mine), "a process whose owner forgot close() would never end"
    ended: list[int] = []
    for _ in range(5):
        updater.submit("layer.0", PIECES, lambda start, end: ended.append(start), after=lambda: time.sleep(0.01))
    updater.submit("layer.1", PIECES, fail)
    updater.close()
    updater.close()
    assert len(ended) == 15
    assert not any(thread.is_alive() for thread in mine)
    with pytest.raises(EngineClosed):
        updater.submit("layer.0", PIECES, fail)


@pytest.mark.parametrize("failing", [False, True], ids=["done", "failed"])
def test_idle_threads_hold_no_planes(updater: Updater, failing: bool) -> None:
    plane = torch.zeros(N)
    gone = weakref.ref(plane)

    def touch(start: int, end: int, plane: Tensor = plane) -> None:
        plane[start:end] = 1

    future = updater.submit("layer.0", [(0, N)], touch, after=fail if failing else (lambda plane=plane: None))
    error = future.exception(SOON_S)
    assert (error is not None) == failing
    del plane, touch, future, error
    deadline_s = time.monotonic() + SOON_S  # the worker drops the job right after it has set the future
    while gone() is not None and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.001)
    assert gone() is None


@pytest.mark.parametrize(("split", "gradient"), [(True, torch.bfloat16), (False, torch.float32)])
def test_an_update_runs_the_kernel_that_was_compiled_ahead(
    updater: Updater, split: bool, gradient: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "adamw_split" if split else "adamw_whole"
    fresh = kernels._compiled(getattr(kernels, name).py_func)
    monkeypatch.setattr(kernels, name, fresh)
    updater.submit_compilation(AdamW(), split, gradient).result()
    [signature] = fresh.signatures
    coefficients = AdamW().coefficients(1)
    updater.submit_update(
        "a", AdamW(), make_planes(1, split), make_grad(1).to(gradient), SEGMENTS, coefficients
    ).result()
    assert fresh.signatures == [signature], "the update compiled its kernel again"

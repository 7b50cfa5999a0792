"""Arenas map exactly the requested memory, and are pinned in chunks that no copy crosses."""

import gc
import itertools
import re
import resource
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.errors import PlanRefused
from megatrain.host_memory.arena import PAGE_BYTES, Arena, PinRefused, cuda_pinner, page_ceil, plan_chunks

MIB = 1 << 20


class FakePinner:
    """Pins up to a limit and checks like the driver: a range is pinned once and unpinned by its own address."""

    def __init__(self, limit_bytes: int = 1 << 62):
        self.limit_bytes, self.pinned = limit_bytes, {}

    def register(self, address: int, size_bytes: int) -> int:
        if sum(self.pinned.values()) + size_bytes > self.limit_bytes:
            return 2
        overlap = [a for a, n in self.pinned.items() if a < address + size_bytes and address < a + n]
        if overlap:
            return 712
        self.pinned[address] = size_bytes
        return 0

    def unregister(self, address: int) -> int:
        return 0 if self.pinned.pop(address, None) else 713

    def explain(self, code: int) -> str:
        return {2: "out of memory", 713: "not mapped"}[code]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("size_bytes", [0, 1, PAGE_BYTES, PAGE_BYTES + 1, 3 * MIB + 12345, 33 * MIB])
def test_mapped_bytes_are_the_bytes_asked_within_a_page(size_bytes: int) -> None:
    with Arena(size_bytes) as arena:
        assert arena.nbytes == page_ceil(max(size_bytes, 1))
        assert 0 <= arena.nbytes - size_bytes <= PAGE_BYTES
        assert arena.address % PAGE_BYTES == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_untouched_range_costs_no_memory_and_a_touched_one_its_size() -> None:
    before_bytes = resident_bytes()
    with Arena(512 * MIB) as arena:
        plane = arena.tensor(0, 128 * MIB, torch.float32)
        assert plane[-1].item() == 0
        assert resident_bytes() - before_bytes < 8 * MIB
        plane[: 16 * MIB].fill_(1)
        assert 64 * MIB <= resident_bytes() - before_bytes < 72 * MIB
        del plane
    assert resident_bytes() - before_bytes < 8 * MIB


def test_tensors_are_views_of_the_same_memory_and_keep_it_alive() -> None:
    arena = Arena(4096)
    words, halves = arena.tensor(64, 16, torch.int32), arena.tensor(64, 32, torch.int16)
    words.fill_(0x00020001)
    assert halves.tolist() == [1, 2] * 16
    assert words.data_ptr() == arena.address + 64
    assert arena.tensor(4096, 0, torch.float32).numel() == 0
    arena.close()
    arena.close()
    del arena, words
    gc.collect()
    assert halves.tolist() == [1, 2] * 16


def test_a_tensor_outside_the_arena_or_off_its_grid_is_refused() -> None:
    with Arena(100) as arena:
        for offset_bytes, numel in [(0, 26), (-4, 1), (100, 1), (2, 4)]:
            with pytest.raises(AssertionError):
                arena.tensor(offset_bytes, numel, torch.float32)
    with pytest.raises(AssertionError, match="closed"):
        arena.tensor(0, 1, torch.float32)


def test_more_memory_than_the_system_maps_is_refused_with_the_size() -> None:
    with pytest.raises(PlanRefused, match=r"4,194,304\.0 GiB"):
        Arena(1 << 52)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 3), st.integers(1, 20))
def test_chunks_end_at_cuts_only_and_are_bounded(unit_pages: list[int], tail_pages: int, chunk_pages: int) -> None:
    cuts = [sum(unit_pages[: i + 1]) * PAGE_BYTES for i in range(len(unit_pages))]
    mapped_bytes = cuts[-1] + tail_pages * PAGE_BYTES
    chunks = plan_chunks(mapped_bytes, cuts, chunk_pages * PAGE_BYTES)
    assert [start for start, _ in chunks] == [0] + [end for _, end in chunks[:-1]]
    assert chunks[-1][1] == mapped_bytes
    allowed = {*cuts, mapped_bytes}
    for start, end in chunks:
        assert end in allowed
        assert end - start <= chunk_pages * PAGE_BYTES or not any(start < cut < end for cut in cuts)
    for (start, _), (_, next_end) in itertools.pairwise(chunks):
        assert next_end - start > chunk_pages * PAGE_BYTES, "two chunks that would have fitted in one"


def test_cuts_off_the_page_grid_or_outside_are_refused() -> None:
    for cut in (1, PAGE_BYTES + 512, 3 * PAGE_BYTES, -PAGE_BYTES):
        with pytest.raises(AssertionError, match="page grid"):
            plan_chunks(2 * PAGE_BYTES, [cut], MIB)


def test_register_pins_exactly_the_arena_and_close_unpins_it() -> None:
    pinner = FakePinner()
    arena = Arena(10 * MIB + 1)
    cuts = [i * MIB for i in range(11)]
    arena.register(cuts, pinner=pinner, chunk_bytes=4 * MIB)
    assert list(pinner.pinned.values()) == [4 * MIB, 4 * MIB, 2 * MIB + PAGE_BYTES]
    assert arena.pinned_bytes == arena.nbytes == page_ceil(10 * MIB + 1)
    arena.unregister()
    assert (arena.pinned_bytes, pinner.pinned) == (0, {})
    arena.register(cuts, pinner=pinner)
    arena.close()
    assert (arena.pinned_bytes, pinner.pinned) == (0, {})


def test_a_pin_limit_is_reported_with_what_was_pinned_and_leaves_usable_unpinned_memory() -> None:
    pinner = FakePinner(limit_bytes=9 * MIB)
    with Arena(16 * MIB) as arena:
        plane = arena.tensor(0, 4 * MIB, torch.float32)
        plane.fill_(3)
        with pytest.raises(PinRefused, match=r"8 MiB .* CUDA error 2, out of memory") as refusal:
            arena.register(range(0, 17 * MIB, MIB), pinner=pinner, chunk_bytes=4 * MIB)
        assert (refusal.value.pinned_bytes, refusal.value.asked_bytes) == (8 * MIB, 16 * MIB)
        assert (arena.pinned_bytes, pinner.pinned) == (0, {})
        assert torch.equal(plane, torch.full_like(plane, 3))


def test_an_arena_dropped_without_close_is_unpinned() -> None:
    pinner = FakePinner()
    arena = Arena(MIB)
    arena.register([], pinner=pinner)
    assert pinner.pinned
    del arena
    gc.collect()
    assert not pinner.pinned


def test_an_unpin_failure_is_a_warning_and_the_other_chunks_are_still_unpinned(caplog) -> None:
    pinner = FakePinner()
    with Arena(2 * MIB) as arena:
        arena.register([MIB], pinner=pinner, chunk_bytes=MIB)
        pinner.pinned.pop(arena.address + MIB)
    assert not pinner.pinned
    assert "CUDA error 713, not mapped" in caplog.text


@pytest.mark.skipif(cuda_pinner() is not None, reason="for machines without CUDA")
def test_without_cuda_nothing_is_pinned() -> None:
    with Arena(MIB) as arena:
        arena.register([])
        assert arena.pinned_bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_forked_children_get_an_arena_only_while_it_is_not_pinned() -> None:
    def kept_from_children(address: int) -> bool:
        """Whether the mapping at `address` has the flag "dc": do not copy on fork."""
        smaps = Path("/proc/self/smaps").read_text()
        mapping = next(part for part in re.split(r"(?m)^(?=[0-9a-f]+-)", smaps) if part.startswith(f"{address:x}-"))
        return "dc" in re.findall(r"VmFlags:(.*)", mapping)[0].split()

    with Arena(3 * MIB) as arena:
        assert not kept_from_children(arena.address)
        arena.register([], pinner=FakePinner())
        assert kept_from_children(arena.address)
        arena.unregister()
        assert not kept_from_children(arena.address)


@pytest.mark.gpu
def test_a_refused_pin_leaves_no_error_behind_for_the_next_kernel() -> None:
    pinner = cuda_pinner()
    assert pinner is not None
    with Arena(8 * MIB) as arena:
        ones = torch.ones(16, device="cuda")
        arena.register([4 * MIB], chunk_bytes=4 * MIB)
        assert arena.tensor(4 * MIB, 1, torch.float32).is_pinned()
        assert pinner.register(arena.address, MIB) != 0
        assert (ones + 1).sum().item() == 32

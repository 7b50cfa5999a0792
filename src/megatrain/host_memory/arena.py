"""Host memory of an exact size, pinned in bounded chunks.

[Note: arena lifetime]
The mapping belongs to an anonymous `mmap` object. Every tensor returned by `Arena.tensor` holds a reference to it, so the memory
stays mapped until the arena *and* the last of its tensors are gone. The pins belong to the arena: `unregister()`, `close()` or
garbage collection of the arena removes them. The owner must wait for its device streams first: a copy in flight needs the pin.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatrain.errors import MegatrainError, PlanRefused
from megatrain.units import gib, gibs

logger = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE
# 4 GiB take about 0.65 s. Hundreds of small registrations take minutes; a huge one fails where several succeed.
CHUNK_BYTES = 4 << 30


class PinRefused(MegatrainError):
    """The system refused to pin an arena after `pinned_bytes`, a hint at the limit. Nothing of the arena is pinned."""

    def __init__(self, pinned_bytes: int, asked_bytes: int, code: int, reason: str):
        self.pinned_bytes, self.asked_bytes = pinned_bytes, asked_bytes
        pinned, asked = gibs(pinned_bytes, asked_bytes)
        super().__init__(
            f"the system pinned {pinned} of host memory and then refused to pin more "
            f"({asked} are needed): CUDA error {code}, {reason}"
        )


class HostPinner(Protocol):
    """The part of the CUDA runtime that an arena uses. `register` and `unregister` return 0 or an error code."""

    def register(self, address: int, size_bytes: int) -> int: ...

    def unregister(self, address: int) -> int: ...

    def explain(self, code: int) -> str: ...


class CudaPinner:
    """Page-locks memory for all CUDA devices. Calls block: they fault the pages in first."""

    # Portable: the pin holds for every device context of the process, not only for the current one.
    _PORTABLE = 1

    def __init__(self) -> None:
        runtime = torch.cuda.cudart()
        assert runtime is not None, "this torch has no CUDA runtime"
        self._runtime = runtime

    def register(self, address: int, size_bytes: int) -> int:
        return self._checked(int(self._runtime.cudaHostRegister(address, size_bytes, self._PORTABLE)))

    def unregister(self, address: int) -> int:
        return self._checked(int(self._runtime.cudaHostUnregister(address)))

    def explain(self, code: int) -> str:
        return str(self._runtime.cudaGetErrorString(self._runtime.cudaError(code)))

    @staticmethod
    def _checked(code: int) -> int:
        if code != 0:  # clear the runtime's last error: torch would report it as the failure of its next kernel launch
            major = (torch.version.cuda or "").split(".")[0]
            ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()
        return code


def cuda_pinner() -> CudaPinner | None:
    """The pinner of this machine, or None without a CUDA device."""
    return CudaPinner() if torch.cuda.is_available() else None


class Arena:
    """Anonymous memory, zero until written. The system provides a page when it is first touched or pinned.

    Attributes:
        nbytes: Bytes mapped: `size_bytes` rounded up to whole pages.
        address: Of the first byte, page aligned.

    Raises:
        PlanRefused: The system refuses to map the memory.
    """

    def __init__(self, size_bytes: int):
        assert size_bytes >= 0, size_bytes
        self.size_bytes = size_bytes
        self.nbytes = page_ceil(max(size_bytes, 1))
        try:
            # Private: shared anonymous memory counts as shmem, which has its own limit and its own switch for huge pages.
            self._memory = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise PlanRefused(f"the system refuses to map {gib(self.nbytes)} of host memory: {error}") from error
        _advise(self._memory, "MADV_HUGEPAGE")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._pins: list[tuple[HostPinner, int, int]] = []  # (pinner, address, bytes)
        self._closed = False
        # An arena dropped without close() must not leave pins on addresses that the system reuses. At exit the driver removes
        # them itself, and its library may be gone before Python's exit handlers run.
        weakref.finalize(self, _unpin_all, self._pins).atexit = False

    def tensor(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor (numel,) on this memory. See [Note: arena lifetime]."""
        assert not self._closed, "the arena is closed"
        end_bytes = offset_bytes + numel * dtype.itemsize
        assert 0 <= offset_bytes <= end_bytes <= self.size_bytes, (offset_bytes, end_bytes, self.size_bytes)
        assert offset_bytes % dtype.itemsize == 0, (offset_bytes, dtype)
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=offset_bytes)

    @property
    def pinned_bytes(self) -> int:
        return sum(size_bytes for _, _, size_bytes in self._pins)

    def register(
        self, cuts: Sequence[int], *, pinner: HostPinner | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Pin the whole arena. Blocks and touches every page. Does nothing without a CUDA device and without `pinner`.

        Args:
            cuts: Page-aligned offsets in bytes at which a registration may end: the boundaries between units. No copy may cross
                from one registration into another.

        Raises:
            PinRefused: Nothing is pinned; the arena remains usable as pageable memory.
        """
        assert not self._closed, "the arena is closed"
        assert not self._pins, "the arena is registered already"
        pinner = pinner or cuda_pinner()
        if pinner is None:
            return
        # After a fork, the first write to a shared page moves the parent to a new page while the DMA engine keeps using the old
        # one. So children do not get pinned memory at all.
        _advise(self._memory, "MADV_DONTFORK")
        for start, end in plan_chunks(self.nbytes, cuts, chunk_bytes):
            code = pinner.register(self.address + start, end - start)
            if code != 0:
                pinned_bytes = self.pinned_bytes
                self.unregister()
                raise PinRefused(pinned_bytes, self.nbytes, code, pinner.explain(code))
            self._pins.append((pinner, self.address + start, end - start))

    def unregister(self) -> None:
        """Remove all pins. The memory keeps its contents."""
        if not self._closed:
            _unpin_all(self._pins)
            _advise(self._memory, "MADV_DOFORK")

    def close(self) -> None:
        """Unpin and release the memory. A second call does nothing."""
        if not self._closed:
            self.unregister()
            self._closed = True
            del self._memory

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def two_pinned(size_bytes: int) -> list[Arena]:
    """Two pinned buffers: a DMA uses one while the CPU uses the other."""
    arenas = [Arena(max(size_bytes, 1)) for _ in range(2)]
    for arena in arenas:
        arena.register([0, arena.nbytes])
    return arenas


def page_ceil(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def plan_chunks(mapped_bytes: int, cuts: Sequence[int], chunk_bytes: int) -> list[tuple[int, int]]:
    """(start, end) ranges that cover `[0, mapped_bytes)` in order and end only at cuts (or at the end).

    `cuts` are page-aligned, in any order. Each range extends to the last cut within `chunk_bytes`, or to its first cut if that is
    farther.
    """
    astray = [cut for cut in cuts if cut % PAGE_BYTES or not 0 <= cut <= mapped_bytes]
    assert not astray, f"cuts off the page grid or outside the arena of {mapped_bytes} bytes: {astray}"
    ends = sorted({*cuts, mapped_bytes} - {0})
    chunks: list[tuple[int, int]] = []
    start = 0
    for end, next_end in zip(ends, [*ends[1:], None], strict=True):
        if next_end is None or next_end - start > chunk_bytes:
            chunks.append((start, end))
            start = end
    return chunks


def _unpin_all(pins: list[tuple[HostPinner, int, int]]) -> None:
    while pins:
        pinner, address, size_bytes = pins.pop()
        code = pinner.unregister(address)
        if code != 0:
            # Harmless: the memory only stays locked until the process ends.
            reason = pinner.explain(code)
            logger.warning("could not unpin %s of host memory: CUDA error %d, %s", gib(size_bytes), code, reason)


def _advise(memory: mmap.mmap, name: str) -> None:
    """Give Linux advice about huge pages or forks. The memory works without it."""
    option = getattr(mmap, name, None)
    if option is None:
        return
    try:
        memory.madvise(option)
    except OSError as error:  # a kernel built without transparent huge pages
        logger.debug("madvise(%s) is not available: %s", name, error)

"""The optimizer's side of a step: a background job per unit, waits for it, and the fp16 loss scale.

The updates of step n are launched in forward order when the norm of step n is known. They run under the forward of step n + 1,
which waits for a unit's latest job before it copies that unit's weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch

from megatrain.checkpoint.host_planes import HostPlanes
from megatrain.device.streams import Event
from megatrain.errors import UserError
from megatrain.host_memory.store import HostStore, UnitPlanes
from megatrain.models.structure import Unit
from megatrain.optim.spec import OptimizerSpec, Segment, StepCoefficients, segments_of
from megatrain.optim.updater import CpuUpdater, cut_pieces


@dataclass(frozen=True)
class LossScale:
    """Dynamic fp16 loss scale, with the defaults of torch.amp.GradScaler.

    A step with non-finite gradients is skipped and lowers the scale; `growth_interval` good steps in a row raise it. All factors
    are powers of two, so scaling and unscaling are exact.

    Attributes:
        scale: Current factor on the loss; gradients are multiplied by `1 / scale`.
        good_steps: Good steps since the scale last changed.
        growth: Factor on the scale after `growth_interval` good steps.
        backoff: Factor on the scale after a bad step.
        least, most: Bounds of the scale. If the loss itself overflows, no lower scale helps.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5
    least: float = 1.0
    most: float = 2.0**32

    def __post_init__(self) -> None:
        assert self.growth_interval >= 1, self.growth_interval
        assert 0.0 < self.backoff < 1.0 < self.growth, (self.backoff, self.growth)
        assert 0.0 < self.least <= self.scale <= self.most, (self.least, self.scale, self.most)
        factors = (self.scale, self.growth, self.backoff, self.least, self.most)
        assert all(math.frexp(factor)[0] == 0.5 for factor in factors), f"not all powers of two: {factors}"
        assert 0 <= self.good_steps < self.growth_interval, self.good_steps

    def after(self, finite: bool) -> LossScale:
        """The state after a step whose gradients were all `finite` or not."""
        if not finite:
            return replace(self, scale=max(self.scale * self.backoff, self.least), good_steps=0)
        if self.good_steps + 1 < self.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(self.scale * self.growth, self.most), good_steps=0)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> LossScale:
        """The inverse of `state_dict`. UserError for a state that no run writes."""
        try:
            return cls(**state)
        except (TypeError, AssertionError) as error:
            raise UserError(f"the checkpoint is damaged: its loss scale is invalid: {error}", "state.json") from error


class HostOptimizer:
    """Updates all units, on host threads or on the device. Implements `gradients.SlabJobs`.

    Args:
        store: The planes.
        units: All units, in forward order: the order of updates.
        frozen: Full names of parameters that are not updated.
        optim: The optimizer.
        updater: The host threads.

    Attributes:
        coefficients: Numbers of the step for `update_from`, set before its backward.
        saving: The latest save's planes. While it runs, it copies a unit, or delays the update, before the unit changes.
    """

    def __init__(
        self,
        store: HostStore,
        units: Sequence[Unit],
        frozen: Collection[str],
        undecayed: Collection[str],
        optim: OptimizerSpec,
        updater: CpuUpdater,
    ):
        self._store = store
        self._units = [unit for unit in units if store.units[unit.name].trained_numel]
        self._updater = updater
        self._optim = optim
        self._segments = {
            unit.name: _cut(_trained_segments(unit, frozen, undecayed, optim), store.units[unit.name]) for unit in units
        }
        self._jobs: dict[str, Future[None]] = {}
        self.coefficients: StepCoefficients | None = None
        self.saving: HostPlanes | None = None

    def compile_kernels(self, gradient: torch.dtype) -> None:
        """Start compiling the host kernel for gradients of this type, so that the first update does not wait. Returns at once."""
        if not all(self._store.units[unit.name].resident for unit in self._units):
            self._updater.submit_compilation(self._optim, "lo" in self._store.dtypes, gradient)

    def launch(self, coefficients: StepCoefficients, arrived: Mapping[str, Event]) -> None:
        """Launch the update of every unit from its gradient plane, on threads or on the compute stream. Asynchronous.

        Args:
            coefficients: Numbers of this step.
            arrived: By unit name, the event after the copy into its gradient plane.
        """
        for unit in self._units:
            planes = self._store.units[unit.name]
            assert planes.grad is not None, unit.name
            if planes.resident:
                if self.saving is not None:
                    self.saving.protect_now(unit.name)
                self._optim.update_on_device(planes, planes.grad, self._segments[unit.name], coefficients)
                planes.grad = None  # the allocator reuses its memory for later work on the same stream only
                continue
            self._protect(unit)
            self._jobs[unit.name] = self._submit_update(unit, planes.grad, coefficients, arrived[unit.name])

    def update_from(self, unit: Unit, slab: torch.Tensor, arrived: Event) -> Future[None]:
        """Launch a unit's update from a gradient slab, with `self.coefficients`."""
        assert self.coefficients is not None
        if not slab.numel():  # of this rank's shard no element is trained
            return _done(arrived)
        self._protect(unit)
        job = self._jobs[unit.name] = self._submit_update(unit, slab, self.coefficients, arrived)
        return job

    def add(self, unit: Unit, slab: torch.Tensor, first: bool, arrived: Event) -> Future[None]:
        """Add a slab to the unit's gradient plane; in the `first` accumulation step overwrite the plane."""
        plane = self._store.units[unit.name].grad
        assert plane is not None, unit.name
        if not slab.numel():
            return _done(arrived)
        if first and plane.dtype == slab.dtype:
            pieces = cut_pieces(plane.numel(), self._updater.threads)
            return self._updater.submit(
                unit.name, pieces, lambda start, end: plane[start:end].copy_(slab[start:end]), after=arrived.synchronize
            )
        return self._updater.submit_add(unit.name, plane, slab, first, arrived.synchronize)

    def squared_norm(self) -> float:
        """Sum of squares over all gradient planes, after the adds launched so far. Blocks."""
        sums, on_device = [], []
        for planes in (self._store.units[unit.name] for unit in self._units):
            assert planes.grad is not None, planes.name
            if planes.resident:
                # fp64 like the host's sum: the norm does not depend on where a unit lives.
                on_device.append(torch.linalg.vector_norm(planes.grad, dtype=torch.float64).square())
            else:
                sums.append(self._updater.submit_sumsq(planes.name, planes.grad))
        return sum(job.result() for job in sums) + (float(torch.stack(on_device).sum()) if on_device else 0.0)

    def finished(self, unit_name: str) -> bool:
        """Whether no job works on the unit's masters. A failed job counts as finished: `wait` raises its error."""
        job = self._jobs.get(unit_name)
        return job is None or job.done()

    def wait(self, unit_name: str) -> None:
        """Block until the unit's masters are at rest. Raises its job's error, every time."""
        job = self._jobs.get(unit_name)
        if job is not None:
            job.result()
            del self._jobs[unit_name]

    def expect(self, jobs: Mapping[str, Future[None]]) -> None:
        """Register jobs that read the units' masters from a checkpoint: from now on `wait` waits for these."""
        self._jobs = dict(jobs)

    def forget(self, jobs: Mapping[str, Future[None]]) -> None:
        """Drop jobs: nobody waits for them or gets their errors any more."""
        self._jobs = {name: job for name, job in self._jobs.items() if job is not jobs.get(name)}

    def pending(self) -> dict[str, Future[None]]:
        """Latest job by unit name, of units that nobody has waited for yet."""
        return dict(self._jobs)

    def wait_all(self) -> None:
        """Block until all masters are at rest."""
        for unit in self._units:
            self.wait(unit.name)

    def close(self) -> None:
        self._updater.close()

    def _submit_update(
        self, unit: Unit, grad: torch.Tensor, coefficients: StepCoefficients, arrived: Event
    ) -> Future[None]:
        planes, segments = self._store.units[unit.name], self._segments[unit.name]
        return self._updater.submit_update(
            unit.name, self._optim, planes, grad, segments, coefficients, arrived.synchronize
        )

    def _protect(self, unit: Unit) -> None:
        if self.saving is not None:
            pieces = cut_pieces(self._store.units[unit.name].numel, self._updater.threads)
            self.saving.protect(unit.name, self._updater, pieces)


def _done(arrived: Event) -> Future[None]:
    """A job with nothing to do."""
    arrived.synchronize()
    job: Future[None] = Future()
    job.set_result(None)
    return job


def _trained_segments(
    unit: Unit, frozen: Collection[str], undecayed: Collection[str], optim: OptimizerSpec
) -> list[Segment]:
    """Segments of a unit that are updated: those of runs of entries between frozen ones."""
    segments: list[Segment] = []
    for is_frozen, run in groupby(unit.layout.entries, lambda entry: unit.prefix + entry.name in frozen):
        if not is_frozen:
            entries = ((unit.prefix + e.name, e.shape, e.offset, e.numel) for e in run)
            segments += segments_of(entries, optim, undecayed)
    return segments


def _cut(segments: Sequence[Segment], planes: UnitPlanes) -> list[Segment]:
    """The parts of a unit's segments that lie in its planes, counted from the planes' first element."""
    start, end = planes.start, planes.start + planes.numel
    return [
        segment._replace(start=max(segment.start, start) - start, end=min(segment.end, end) - start)
        for segment in segments
        if segment.start < end and segment.end > start
    ]

"""The optimizer's side of a step: one job per unit in the background, and who must wait for which.

Every unit has at most one job that matters: its latest. An update of step n is launched when the norm of step n is known,
in forward order, and runs under the forward of step n + 1, which waits for a unit's job before it copies that unit's weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby

import torch

from megatrain.checkpoint.host_planes import HostPlanes
from megatrain.device.streams import Event
from megatrain.host_memory.store import HostStore
from megatrain.models.structure import Unit
from megatrain.optim.spec import OptimizerSpec, Segment, StepCoefficients, segments_of
from megatrain.optim.updater import CpuUpdater, cut_pieces


class HostOptimizer:
    """AdamW over the host planes. Implements `gradients.SlabJobs`.

    Args:
        store: The host planes.
        units: All units, in forward order: the order of updates.
        frozen: Full names of parameters that never change.
        optim: Hyper-parameters.
        updater: The threads.
    """

    def __init__(
        self,
        store: HostStore,
        units: Sequence[Unit],
        frozen: Collection[str],
        optim: OptimizerSpec,
        updater: CpuUpdater,
    ):
        self._store = store
        self._units = [unit for unit in units if unit.layout.numel]
        self._updater = updater
        self._optim = optim
        self._segments = {unit.name: _trained_segments(unit, frozen, optim) for unit in units}
        self._jobs: dict[str, Future[None]] = {}
        self.coefficients: StepCoefficients | None = None
        self.saving: HostPlanes | None = None
        """The latest save's planes: while it runs, an update is held up until its unit is written or copied."""

    def compile_kernels(self, gradient: torch.dtype) -> None:
        """Have the threads compile what updates need while the engine is made and the first step computes. Returns at once.

        Args:
            gradient: Type of the gradients that AdamW reads.
        """
        if not all(self._store.units[unit.name].resident for unit in self._units):
            self._updater.submit_compilation(self._optim, "lo" in self._store.dtypes, gradient)

    def launch(self, coefficients: StepCoefficients, arrived: Mapping[str, Event]) -> None:
        """Start the update of every unit from its gradient plane: on threads, or on the compute stream. Returns at once.

        Args:
            coefficients: Numbers of this step.
            arrived: Unit name -> the event behind the copy that fills its gradient plane.
        """
        for unit in self._units:
            planes = self._store.units[unit.name]
            assert planes.grad is not None, unit.name
            if planes.resident:
                if self.saving is not None:
                    self.saving.protect_now(unit.name)
                self._optim.update_on_device(planes, planes.grad, self._segments[unit.name], coefficients)
                planes.grad = None  # its memory is used again only by work behind the update on the same stream
                continue
            self._protect(unit)
            self._jobs[unit.name] = self._submit_update(unit, planes.grad, coefficients, arrived[unit.name])

    def eat(self, unit: Unit, slab: torch.Tensor, arrived: Event) -> Future[None]:
        """Update a unit straight from a slab, with the coefficients set before the backward."""
        assert self.coefficients is not None
        self._protect(unit)
        job = self._jobs[unit.name] = self._submit_update(unit, slab, self.coefficients, arrived)
        return job

    def add(self, unit: Unit, slab: torch.Tensor, first: bool, arrived: Event) -> Future[None]:
        """Add a slab to the unit's gradient plane, or set the plane to it in the first window of a step."""
        plane = self._store.units[unit.name].grad
        assert plane is not None, unit.name
        if first and plane.dtype == slab.dtype:
            pieces = cut_pieces(plane.numel(), self._updater.threads)
            return self._updater.submit(
                unit.name, pieces, lambda start, end: plane[start:end].copy_(slab[start:end]), after=arrived.synchronize
            )
        return self._updater.submit_add(unit.name, plane, slab, first, arrived.synchronize)

    def squared_norm(self) -> float:
        """Sum of squares over all gradient planes, once the adds launched so far are done. Blocks."""
        sums, on_device = [], []
        for planes in (self._store.units[unit.name] for unit in self._units):
            assert planes.grad is not None, planes.name
            if planes.resident:
                # fp64 like the host's sum, so that the norm does not depend on where a unit lives.
                on_device.append(torch.linalg.vector_norm(planes.grad, dtype=torch.float64).square())
            else:
                sums.append(self._updater.submit_sumsq(planes.name, planes.grad))
        return sum(job.result() for job in sums) + (float(torch.stack(on_device).sum()) if on_device else 0.0)

    def finished(self, unit_name: str) -> bool:
        """Whether the unit's masters are at rest. A failed job counts: `wait` raises its error."""
        job = self._jobs.get(unit_name)
        return job is None or job.done()

    def wait(self, unit_name: str) -> None:
        """Block until the unit's masters are at rest. The error of its job is raised here, every time."""
        job = self._jobs.get(unit_name)
        if job is not None:
            job.result()
            del self._jobs[unit_name]

    def expect(self, jobs: Mapping[str, Future[None]]) -> None:
        """From now on the units' masters are at rest when these jobs have ended: they are being read from a checkpoint."""
        self._jobs = dict(jobs)

    def forget(self, jobs: Mapping[str, Future[None]]) -> None:
        """Nobody needs to wait for these jobs any more, nor to hear of their errors."""
        self._jobs = {name: job for name, job in self._jobs.items() if job is not jobs.get(name)}

    def pending(self) -> dict[str, Future[None]]:
        """Unit name -> the job behind which its masters are at rest, of units that nobody has waited for yet."""
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
            pieces = cut_pieces(unit.layout.numel, self._updater.threads)
            self.saving.protect(unit.name, self._updater, pieces)


def _trained_segments(unit: Unit, frozen: Collection[str], optim: OptimizerSpec) -> list[Segment]:
    """The parts of a unit's flat range that AdamW changes: runs of entries between frozen ones."""
    segments: list[Segment] = []
    for is_frozen, run in groupby(unit.layout.entries, lambda entry: unit.prefix + entry.name in frozen):
        if not is_frozen:
            segments += segments_of(((unit.prefix + e.name, e.shape, e.offset, e.numel) for e in run), optim)
    return segments

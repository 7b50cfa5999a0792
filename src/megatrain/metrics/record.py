"""The figures of one optimizer step, and `metrics.jsonl`, the file that holds them.

`metrics.jsonl` is the contract with every viewer: one StepRecord as JSON per line, in step order. Names carry their units. A
resumed run appends to the same file, after removing the records of steps that it computes again.

[Note: which work a record is about]
A record is written when its step's loss is known. Gradients may still be on their way to the host then, and AdamW of the step
has not started; nothing waits just to be measured. So the figures of copies and AdamW cover what *ended* since the previous
record: the step's own H2D copies, nearly all of its D2H copies, and the updates of the previous step. In a steady run that is
one step's work.

[Note: hidden copies]
A copy is hidden while the compute stream works, that is between the step's first launch and its end, except while it waits.
Gaps between two kernels that no wait explains (a host too slow to launch) count as work here; NVML's utilisation shows them.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from io import RawIOBase
from pathlib import Path
from typing import Any

import orjson

from megatrain.errors import UserError, writing
from megatrain.metrics.spans import Span, common, gaps, length, union


@dataclass(frozen=True, kw_only=True)
class Link:
    """Copies in one direction."""

    bytes: int
    busy_s: float  # spent copying
    gbps: float  # 1e9 bytes per second while copying
    share: float | None = None  # of the link's measured rate; None: unknown
    copies: int = 1


@dataclass(frozen=True, kw_only=True)
class PipelineRecord:
    """Where a step's time went; see the notes above. None: the machine or the step has no such figure."""

    computed_s: float  # device busy, from the step's first launch to its end, waits excluded
    # Device idle, by what it waited for (`spans.Wait`). A weight copy that could not start before the unit's update had ended
    # counts as a wait for the optimizer.
    waited_s: dict[str, float] = field(default_factory=dict)
    h2d: Link | None = None  # copies to the device
    d2h: Link | None = None  # and from it
    overlap: float | None = None  # share of the copying time hidden behind device work
    slot_switch_s: float | None = None  # median wait of compute between one layer's weights and the next
    slabs: int = 0  # gradient slabs available to layers; 0 where gradients need none
    slabs_in_use: int = 0  # most slabs in use at once
    slab_waits: int = 0  # how often no slab was free
    adamw_params_per_s: float | None = None  # update rate of the host threads while they were updating
    adamw_gbps: float | None = None  # host memory traffic of those updates, reads and writes [1e9 bytes/s]
    adamw_share: float | None = None  # adamw_gbps over the host memory's measured bandwidth
    gpu_utilisation: float | None = None  # share of the last second in which a kernel ran (NVML)
    device_used_bytes: int | None = None  # in use on the whole device, by all processes (NVML)
    device_reserved_bytes: int | None = None  # reserved by this process's allocator
    device_total_bytes: int | None = None
    host_pinned_bytes: int = 0
    allocation_retries: int = 0  # device allocations of this step that failed at first; each makes the device wait
    device_gap_bytes: int | None = None  # reserved by the allocator above the peak of what tensors used
    compilations: int = 0  # functions compiled during this step
    policy: str = ""  # shape of the step, placement and activation policies, in words
    ladder: tuple[str, ...] = ()  # changes made after running out of device memory, as config lines


def pipeline_of(spans: Sequence[Span], *, adamw_bytes: float) -> PipelineRecord:
    """The figures that follow from the spans that ended since the previous record, with at least one `step` among them.

    `adamw_bytes`: host memory that AdamW reads and writes per parameter.
    """
    step = [span for span in spans if span.row == "step"][-1]
    waits = [span for span in spans if span.row == "wait" and span.start_s >= step.start_s]
    waited: dict[str, float] = {}
    switches: list[float] = []
    before = ""
    for span in sorted(waits, key=lambda one: one.start_s):
        name = span.name
        if name == "weights" and before == "optimizer":
            name = "optimizer"  # the copy could not start before the update had ended
        elif name == "weights":
            switches.append(span.seconds)
        waited[name] = waited.get(name, 0.0) + span.seconds
        before = span.name
    working = gaps((step.start_s, step.end_s), union((s.start_s, s.end_s) for s in waits))
    h2d, d2h, updates = ([span for span in spans if span.row == row] for row in ("h2d", "d2h", "adamw"))
    copies = union((span.start_s, span.end_s) for span in (*h2d, *d2h))
    busy = length(union((span.start_s, span.end_s) for span in updates))
    rate = sum(span.size for span in updates) / busy if busy > 0 else None
    copying = length(copies)
    return PipelineRecord(
        computed_s=length(working),
        waited_s=waited,
        h2d=_link(h2d),
        d2h=_link(d2h),
        overlap=common(copies, working) / copying if copying > 0 else None,
        slot_switch_s=statistics.median(switches) if switches else None,
        adamw_params_per_s=rate,
        adamw_gbps=rate * adamw_bytes / 1e9 if rate is not None else None,
    )


def _link(copies: Sequence[Span]) -> Link | None:
    seconds = sum(span.seconds for span in copies)
    if seconds <= 0:
        return None
    moved = sum(span.size for span in copies)
    return Link(bytes=moved, busy_s=seconds, gbps=moved / seconds / 1e9, copies=len(copies))


def with_shares(
    record: PipelineRecord, *, h2d_gbps: float | None, d2h_gbps: float | None, host_gbps: float | None
) -> PipelineRecord:
    """The record with its rates as shares of the machine's measured ones; None: not measured."""

    def on(link: Link | None, gbps: float | None) -> Link | None:
        return link if link is None or not gbps else replace(link, share=link.gbps / gbps)

    share = record.adamw_gbps / host_gbps if record.adamw_gbps is not None and host_gbps else None
    return replace(record, h2d=on(record.h2d, h2d_gbps), d2h=on(record.d2h, d2h_gbps), adamw_share=share)


def pipeline_from(plain: dict[str, Any]) -> PipelineRecord:
    """A record from its JSON; TypeError if it is none. Unknown names, of a newer version, are dropped."""
    known = {name: value for name, value in plain.items() if name in PipelineRecord.__dataclass_fields__}
    for name in ("h2d", "d2h"):
        link = known.get(name)
        if isinstance(link, dict):
            known[name] = Link(**{key: link[key] for key in Link.__dataclass_fields__ if key in link})
    return PipelineRecord(**{**known, "ladder": tuple(known.get("ladder", ()))})


@dataclass(frozen=True, kw_only=True)
class MeshRecord:
    """A step over all ranks. None: unknown for this step. The ranks of the host engine form a single stage."""

    bubble: float | None = None  # [Note: bubble] in engine/mesh/pipeline_schedule.py; None without a pipeline
    bubble_simulated: float | None = None
    stage_busy_s: tuple[float, ...] = ()  # mean over the ranks of each pipeline stage
    imbalance: float | None = None  # largest of stage_busy_s over their mean, minus one
    stage_peak_bytes: tuple[int, ...] = ()  # largest over the ranks of each pipeline stage
    exposed_collectives_s: float | None = None  # mean over the ranks
    exposed_messages_s: float | None = None  # mean over the ranks
    slowest_rank: int | None = None  # the rank with the most own work compared with its peers
    slowest_excess: float | None = None  # its work over the median of its peers', minus one
    # not recorded:
    sampled: bool = False  # whether the step was profiled, which makes it slow
    stage_layers: tuple[int, ...] = ()
    better_stage_layers: tuple[int, ...] | None = None  # a split that would be more even

    def plain(self, mfu: float | None) -> dict[str, Any]:
        """The figures as `metrics.jsonl` holds them, with the step's MFU."""
        left_out = ("sampled", "stage_layers", "better_stage_layers")
        figures = {"mfu": mfu, **asdict(self)}
        return {name: value for name, value in figures.items() if value is not None and name not in left_out}


# ---------------------------------------------------------------- the record of a step, and its file


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. Step 0, if present, holds the validation loss before the first step and no training loss."""

    step: int  # 1 is the first
    epoch: float  # passes over the data when the step ended
    loss: float | None  # mean cross entropy of the step's target tokens [nats]; None: no target token, or not finite
    grad_norm: float | None  # global norm before clipping; None as above
    learning_rate: float
    rows: int  # rows of the step's batch
    processed_tokens: int  # tokens computed, padding excluded
    trained_tokens: int  # target tokens, those that have a loss
    step_s: float  # wall time from batch to batch, without evaluation and checkpoint
    data_wait_s: float  # part of step_s spent waiting for the batch
    split_s: dict[str, float] = field(default_factory=dict)  # the engine's own parts of step_s, by name
    processed_tokens_per_s: float
    trained_tokens_per_s: float
    aux_loss: float | None = (
        None  # auxiliary loss of the routers as Hugging Face reports it, not part of `loss`; None: off
    )
    expert_max_load: float | None = (
        None  # most tokens of an expert over its layer's mean, in the worst layer; None: no experts
    )
    expert_max_share: float | None = None  # share of the tokens that the busiest expert of any layer got
    expert_idle: float | None = None  # share of the experts that got no token
    mfu: float | None = None  # model FLOPs / (step_s x measured matrix peak), see mfu.py; None: no peak is known
    skipped: str | None = None  # why the step changed nothing; None: it was taken
    skipped_steps: int = 0  # skipped steps of the run so far
    val_loss: float | None = None  # mean cross entropy over the whole validation set [nats], after the step
    val_tokens: int | None = None  # target tokens of the validation set
    val_s: float | None = None
    elapsed_s: float  # since this process started to train
    unix_time_s: float
    host_rss_bytes: int
    device_peak_bytes: int | None = None  # most device memory so far; None on the CPU
    pipeline: PipelineRecord | None = None  # where the step's time went; None: not measured
    mesh: dict[str, Any] = field(default_factory=dict)  # engine: mesh: figures over all ranks, by name


def read_records(path: Path) -> list[StepRecord]:
    """All records of a `metrics.jsonl`, in file order. A truncated last line is dropped, as its step is computed again; a
    damaged line before it is a UserError."""
    if not path.exists():
        return []
    *whole, tail = path.read_bytes().split(b"\n")
    records = [parse_record(line, path, number) for number, line in enumerate(whole, start=1)]
    if tail:
        try:
            records.append(parse_record(tail, path, len(whole) + 1))
        except UserError:
            pass  # the write of this line never ended
    return records


def parse_record(line: bytes, path: Path, number: int) -> StepRecord:
    """The record in one line of the file. Raises UserError, with `path` and line `number`, if it is damaged."""
    try:
        # unknown names are dropped: a file of a newer version stays readable
        plain = {name: value for name, value in orjson.loads(line).items() if name in StepRecord.__dataclass_fields__}
        if plain.get("pipeline") is not None:
            plain["pipeline"] = pipeline_from(plain["pipeline"])
        return StepRecord(**plain)
    except (orjson.JSONDecodeError, AttributeError, TypeError) as error:
        raise UserError(f"is no step record: {error}", f"{path}:{number}", "move the damaged file away") from None


class MetricsWriter:
    """Appends records to `metrics.jsonl`; each line is handed to the operating system at once."""

    def __init__(self, path: Path, resume_step: int = 0):
        """Open the file and atomically remove the records of steps after `resume_step`; UserError if it is damaged."""
        found = read_records(path)
        # the records of earlier processes that the file keeps; the steps of the others will be computed again
        self.history = [record for record in found if record.step <= resume_step] if resume_step else []
        self.dropped = len(found) - len(self.history)
        self._path = path
        self._file = self._rewritten(self.history)

    def write(self, record: StepRecord) -> None:
        """Append a record. If the system refuses it (WriteFailed), readers and the next process drop a line that is cut off."""
        with writing(self._path):
            write_whole(self._file, _line(record))

    def rewrite(self, records: Sequence[StepRecord]) -> None:
        """Atomically replace the file's content: a figure of an earlier process's record was missing. WriteFailed if refused."""
        self._file.close()
        self._file = self._rewritten(records)

    def _rewritten(self, records: Sequence[StepRecord]) -> RawIOBase:
        """The file with these records, open to append more."""
        temporary = self._path.with_name(self._path.name + ".new")
        with writing(self._path):
            with temporary.open("wb") as file:
                file.writelines(_line(record) for record in records)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            return self._path.open("ab", buffering=0)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def write_whole(file: RawIOBase, data: bytes) -> None:
    """Write all of `data` to an unbuffered file: on a nearly full disk one call writes a part and raises nothing."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _line(record: StepRecord) -> bytes:
    plain = asdict(record)
    if record.pipeline is not None:  # figures that a machine or a step does not have are left out
        known = asdict(record.pipeline, dict_factory=lambda pairs: {name: v for name, v in pairs if v is not None})
        plain["pipeline"] = known
    return orjson.dumps(plain) + b"\n"

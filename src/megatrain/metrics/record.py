"""The numbers of a step, and `metrics.jsonl`, the file that holds them.

`metrics.jsonl` is the contract with every viewer: one StepRecord as JSON per line, in the order of the steps. Names
carry their units. A resumed run goes on in the same file, so that the file tells the run's history once, without
steps that were computed, lost in a crash, and computed again.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from io import RawIOBase
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from megatrain.errors import UserError, writing
from megatrain.metrics.pipeline import PipelineRecord, pipeline_from


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. Step 0, if there, holds the validation loss before the first step and no training loss."""

    step: int  # 1 is the first
    epoch: float  # passes over the data when the step ended
    loss: float | None  # mean cross entropy of the step's target tokens [nats]; None: no target token, or not finite
    grad_norm: float | None  # global norm before clipping; None as above
    learning_rate: float
    rows: int  # rows of the step's batch
    processed_tokens: int  # tokens that were computed, padding left out
    trained_tokens: int  # target tokens, those that have a loss
    step_s: float  # wall time from batch to batch, without evaluation and checkpoint
    data_wait_s: float  # part of step_s spent waiting for the batch
    split_s: dict[str, float] = field(default_factory=dict)  # the engine's own parts of step_s, by name
    processed_tokens_per_s: float
    trained_tokens_per_s: float
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
    mesh: dict[str, Any] = field(default_factory=dict)  # engine: mesh: what all ranks say together, by name


_KNOWN = frozenset(item.name for item in fields(StepRecord))


def read_records(path: Path) -> list[StepRecord]:
    """All records of a `metrics.jsonl`, in its order. A last line that was cut off while being written is left out.

    Raises:
        UserError: A line in the middle is damaged.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    whole, tail = lines[:-1], lines[-1]
    records = [parse_record(line, path, number) for number, line in enumerate(whole, start=1)]
    if tail:
        try:
            records.append(parse_record(tail, path, len(lines)))
        except UserError:
            pass  # the write of this line never ended; its step is computed again
    return records


def parse_record(line: bytes, path: Path, number: int) -> StepRecord:
    """One line of the file; `path` and `number` are for the error.

    Raises:
        UserError: The line is damaged.
    """
    try:
        # unknown names are left out: a file of a newer version stays readable
        plain = {name: value for name, value in orjson.loads(line).items() if name in _KNOWN}
        if plain.get("pipeline") is not None:
            plain["pipeline"] = pipeline_from(plain["pipeline"])
        return StepRecord(**plain)
    except (orjson.JSONDecodeError, AttributeError, TypeError) as error:
        raise UserError(f"is no step record: {error}", f"{path}:{number}", "move the damaged file away") from None


class MetricsWriter:
    """Appends records to `metrics.jsonl`; each line is handed to the operating system at once.

    Attributes:
        history: The records of earlier processes of this run that the file keeps.
        dropped: How many records were removed because their steps will be computed again.
    """

    def __init__(self, path: Path, resume_step: int = 0):
        """Open the file; records of steps after `resume_step` are removed from it, atomically.

        Raises:
            UserError: The file that is there is damaged.
            WriteFailed: The system refuses a write.
        """
        found = read_records(path)
        self.history = [record for record in found if record.step <= resume_step] if resume_step else []
        self.dropped = len(found) - len(self.history)
        self._path, temporary = path, path.with_name(path.name + ".new")
        with writing(path):
            with temporary.open("wb") as file:
                file.writelines(_line(record) for record in self.history)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            self._file = path.open("ab", buffering=0)

    def write(self, record: StepRecord) -> None:
        """Append a record.

        Raises:
            WriteFailed: The system refuses it. Half a line at the file's end is left out by readers, and by the next process.
        """
        with writing(self._path):
            write_whole(self._file, _line(record))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_whole(file: RawIOBase, data: bytes) -> None:
    """Write all of `data` to a file without a buffer: on a disk that is nearly full, one call writes a part and says nothing."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _line(record: StepRecord) -> bytes:
    plain = asdict(record)
    if plain["pipeline"] is not None:  # what a machine or a step does not have is left out
        plain["pipeline"] = _without_none(plain["pipeline"])
    return orjson.dumps(plain) + b"\n"


def _without_none(plain: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in plain.items() if value is not None}
    return {name: _without_none(value) if isinstance(value, dict) else value for name, value in kept.items()}

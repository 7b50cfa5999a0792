"""Kills a trainer with SIGKILL at random moments and resumes it, again and again, until the run has ended.

    OMP_NUM_THREADS=1 PYTHONPATH=src:tests/support python tests/support/kill_harness.py --kills 100 --signals KILL,TERM

A trainer that gets a signal which asks (TERM, INT, HUP, USR1) must end with exit code 0 instead.

After every kill, each checkpoint under its own name is read in full and compared with its checksums, by code that shares nothing
with the trainer's choice of where to resume; the next trainer must resume from the newest of them. The killed run must
end with the same files, byte for byte, as one that was never disturbed, and with the same metrics. Trainers are forked from a
process that has imported everything and started nothing, so a cycle takes about a second.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_run
from megatrain.config.load import load_config
from megatrain.metrics.record import read_records
from megatrain.run.loop import train

VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    ("--batch.accumulation_steps=2", "--checkpoint.buffer_gib=0.000001"),
    ("--checkpoint.background=false",),
    ("--precision.compute_dtype=bf16", "--checkpoint.keep_every=4"),
)


AIMED_S = 0.05


@dataclass
class Report:
    """Where the kills hit.

    Attributes:
        kills: Trainers killed.
        in_save: Of these, killed while a checkpoint was being written.
        before_first: Of these, killed before the run had a checkpoint.
        runs: Runs that ended after kills, each equal to the undisturbed one.
        resumes: Trainers that resumed, each from the newest complete checkpoint.
        cycle_s: Seconds of each trainer that was killed.
    """

    kills: int = 0
    in_save: int = 0
    before_first: int = 0
    runs: int = 0
    resumes: int = 0
    cycle_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        mean_s = sum(self.cycle_s) / max(1, len(self.cycle_s))
        return (
            f"{self.kills} kills, {self.in_save} of them during a save, {self.before_first} before the first checkpoint; "
            f"{self.resumes} resumes, each from the newest complete checkpoint; {self.runs} runs ended like the undisturbed one, "
            f"byte for byte; {mean_s:.2f} s a trainer"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--signals", default="KILL", help="names, taken in turn")
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kills"))
    signals = [signal.Signals[f"SIG{name}"] for name in arguments.signals.split(",")]
    report = harness(folder, arguments.kills, arguments.steps, random.Random(arguments.seed), signals)
    print(report)
    if arguments.folder is None:
        shutil.rmtree(folder)


def harness(
    folder: Path, kills: int, steps: int, rng: random.Random, signals: Sequence[signal.Signals] = (signal.SIGKILL,)
) -> Report:
    """Raises AssertionError for whatever must not happen."""
    tiny_run.prepare(folder)
    report = Report()
    number = 0
    while report.kills < kills:
        words = VARIANTS[number % len(VARIANTS)]
        reference = folder / f"undisturbed_{number % len(VARIANTS)}"
        if not reference.exists():
            assert run_to_end(folder, reference, steps, words) is None
        duration_s = json.loads((reference / "seconds").read_text())
        run = folder / f"killed_{number}"
        one_run(folder, run, reference, steps, words, duration_s, kills, rng, report, signals)
        shutil.rmtree(folder / f"killed_{number}")
        number += 1
    return report


def one_run(
    folder: Path, run: Path, reference: Path, steps: int, words: tuple[str, ...], duration_s: float, kills: int,
    rng: random.Random, report: Report, signals: Sequence[signal.Signals],
) -> None:  # fmt: skip
    """Kill and resume one run until it has ended; after the last kill it is left alone."""
    while True:
        expected, before = newest_whole(run), resumes(run)
        # Every second kill is aimed at a save: at a random moment of one that has begun, whatever the machine's speed.
        aimed = report.kills % 2 == 1
        moment_s = rng.uniform(0, AIMED_S if aimed else duration_s) if report.kills < kills else None
        started = time.monotonic()
        killed = run_to_end(folder, run, steps, words, moment_s, aimed, signals[report.kills % len(signals)])
        for step in resumes(run)[len(before) :]:  # none where the kill came first
            report.resumes += 1
            assert step == expected, f"{run} resumed after step {step}, not {expected}"
        if killed is None:
            break
        report.kills += 1
        report.cycle_s.append(time.monotonic() - started)
        report.in_save += any(run.glob(f"checkpoints/*.tmp-{killed}"))
        report.before_first += newest_whole(run) is None
    assert_equal_runs(run, reference, steps)
    report.runs += 1


def run_to_end(
    folder: Path,
    run: Path,
    steps: int,
    words: tuple[str, ...],
    kill_after_s: float | None = None,
    aimed: bool = False,
    number: signal.Signals = signal.SIGKILL,
) -> int | None:
    """Train in a child. Returns its process id if it was killed, None if it ended by itself.

    Args:
        kill_after_s: When to kill it; None: never.
        aimed: Count from the moment when it begins to write a checkpoint.
        number: The signal.
    """
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:  # must never come back into the parent's code
        code = 1
        try:
            quiet = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads that the parent may have begun do not live here
            settings: list[str] = [
                f"--schedule.steps={steps}", "--schedule.kind=cosine", "--checkpoint.every_steps=1", "--checkpoint.keep=2",
                "--data.val={fraction: 0.2}", "--eval.every_steps=3", f"--run.dir={run}", *words,
            ]  # fmt: skip
            train(load_config(tiny_run.config(folder), settings), resume="auto")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    begun = None if aimed else started
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        elapsed_s = time.monotonic() - started
        if done:
            assert os.waitstatus_to_exitcode(status) == 0, (folder / "output.txt").read_text()[-3000:]
            (run / "seconds").write_text(json.dumps(elapsed_s))
            return None
        if begun is None and (not aimed or any(run.glob(f"checkpoints/*.tmp-{pid}"))):
            begun = time.monotonic()
        if kill_after_s is not None and begun is not None and time.monotonic() - begun >= kill_after_s:
            os.kill(pid, number)
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            # a signal that comes before the trainer listens ends it, as it does any process
            assert code in ((0, -number) if number != signal.SIGKILL else (-number,)), (
                number, code, (folder / "output.txt").read_text()[-3000:],
            )  # fmt: skip
            return pid
        time.sleep(0.002)


def resumes(run: Path) -> list[int]:
    """Steps after which trainers of a run have resumed, according to its log."""
    log = run / "log.txt"
    return [int(n) for n in re.findall(r"resumed from .* after step (\d+)", log.read_text())] if log.exists() else []


def newest_whole(run: Path) -> int | None:
    """Step of the newest checkpoint. Each one under its final name must be whole, and `latest` must name one."""
    steps = []
    for folder in run.glob("checkpoints/step_*"):
        if re.fullmatch(r"step_\d+", folder.name):
            assert_whole(folder)
            steps.append(int(folder.name.removeprefix("step_")))
    latest = run / "checkpoints" / "latest"
    if latest.exists():
        assert int(latest.read_text().removeprefix("step_")) in steps, (latest.read_text(), steps)
    return max(steps, default=None)


def assert_whole(folder: Path) -> None:
    """Compare every byte with the manifest, written from docs/checkpoint.md alone."""
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    for name, record in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert len(data) == record["size"], (folder, name)
        if "tensors" not in record:
            assert zlib.crc32(data) == record["crc32"], (folder, name)
            continue
        begin = 8 + int.from_bytes(data[:8], "little")
        assert zlib.crc32(data[:begin]) == record["crc32"], (folder, name)
        for tensor, entry in json.loads(data[8:begin]).items():
            if tensor != "__metadata__":
                first, last = entry["data_offsets"]
                assert zlib.crc32(data[begin + first : begin + last]) == record["tensors"][tensor], (
                    folder,
                    name,
                    tensor,
                )


def assert_equal_runs(run: Path, reference: Path, steps: int) -> None:
    mine, other = (folder / "checkpoints" / f"step_{steps:06d}" for folder in (run, reference))
    names = [str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()]
    assert {str(path.relative_to(mine)) for path in mine.rglob("*") if path.is_file()} == set(names)
    _, differing, failed = filecmp.cmpfiles(mine, other, names, shallow=False)
    assert not differing and not failed, (run, differing, failed)
    numbers = [
        [
            (r.step, r.loss, r.grad_norm, r.learning_rate, r.trained_tokens, r.val_loss)
            for r in read_records(folder / "metrics.jsonl")
        ]
        for folder in (run, reference)
    ]
    assert numbers[0] == numbers[1], run
    assert not list(run.glob("checkpoints/*.tmp-*")), "what dead writers left has been removed"


if __name__ == "__main__":
    sys.exit(main())

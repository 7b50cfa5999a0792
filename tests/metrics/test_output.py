"""Standard output and standard error that die: training outlives them, any other command ends with an error."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import tiny_run
from megatrain.checkpoint.export import verify
from megatrain.errors import WriteFailed
from megatrain.metrics.output import CheckedStream, LastingStream, NoReader
from megatrain.metrics.record import read_records

MEGATRAIN = f"{shlex.quote(sys.executable)} -m megatrain"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.prepare(tmp_path_factory.mktemp("files"))
    YAML().dump(tiny_run.config(folder), folder / "run.yaml")
    return folder


@pytest.fixture
def pipe() -> Iterator[tuple[int, object]]:
    """A pipe's (reading end, writing stream)."""
    read, write = os.pipe()
    with os.fdopen(write, "w", encoding="utf-8") as stream:
        yield read, stream


def shell(line: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize(
    ("redirect", "names"),
    [
        ("| head -n 1", {"output": "Broken pipe"}),
        ("> /dev/full 2> /dev/full", {"output": "No space left on device"}),
        (">&- 2>&-", {}),
    ],
)
def test_training_outlives_its_output(files: Path, tmp_path: Path, redirect: str, names: dict[str, str]) -> None:
    folder = tmp_path / "run"
    done = shell(f"{MEGATRAIN} train {files}/run.yaml --run.dir {folder} --metrics.print_every_s 0 {redirect}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "Error" not in done.stderr
    assert [record.step for record in read_records(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    verify(folder, say=lambda line: None)
    log = (folder / "log.txt").read_text()
    assert len(re.findall(r" step \d/4  loss ", log)) == 4
    for name, reason in names.items():
        assert log.count(f"warning: standard {name} cannot be written ({reason}): training continues") == 1
    assert log.count("cannot be written") == len(names)


def test_an_error_that_nobody_can_read_keeps_its_exit_code(files: Path) -> None:
    assert shell(f"{MEGATRAIN} train {files}/none.yaml 2> /dev/full").returncode == 2


def test_another_command_ends_with_its_output() -> None:
    full = shell(f"{MEGATRAIN} --help > /dev/full")
    assert full.returncode == 5
    assert full.stderr.startswith("error: standard output: cannot be written: No space left on device")
    read = shell(f"{MEGATRAIN} --help | true")
    assert (read.returncode, read.stderr) in ((141, ""), (0, "")), "0: the reader took the text before it ended"


def test_a_lasting_stream_drops_what_a_dead_pipe_refuses(pipe: tuple[int, object]) -> None:
    read, stream = pipe
    os.close(read)
    lasting = LastingStream(stream, "standard output")
    lasting.write("a line\n")
    lasting.flush()
    lasting.writelines(["more\n", "lines\n"])
    lasting.flush()
    stream.flush()  # type: ignore[attr-defined]  nothing is left that could fail at the end of the process


def test_a_lasting_stream_goes_on_where_a_full_disk_has_room_again(tmp_path: Path) -> None:
    """/dev/full takes the place of the disk for one line."""
    with (tmp_path / "out.txt").open("w") as stream, Path("/dev/full").open("w") as full:
        lasting = LastingStream(stream, "standard output")
        disk = os.dup(stream.fileno())
        for target, line in ((disk, "first\n"), (full.fileno(), "lost\n"), (disk, "third\n")):
            os.dup2(target, stream.fileno())
            lasting.write(line)
            lasting.flush()
        os.close(disk)
    assert (tmp_path / "out.txt").read_text() == "first\nthird\n"


def test_a_checked_stream_says_why(pipe: tuple[int, object]) -> None:
    read, stream = pipe
    os.close(read)
    checked = CheckedStream(stream, "standard output")
    checked.write("a line\n")
    with pytest.raises(NoReader):
        checked.flush()
    with Path("/dev/full").open("w") as full:
        checked = CheckedStream(full, "standard output")
        checked.write("a line\n")
        with pytest.raises(WriteFailed, match="standard output: cannot be written"):
            checked.flush()

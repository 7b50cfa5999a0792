"""`megatrain trace`: a file that Chrome reads, of a run and of a shape."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatrain.commands.main import main
from megatrain.metrics.spans import Span, chrome_trace
from tiny_run import config, prepare


def rows_of(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Events by the name of their row; every event must have one."""
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows[names[event["tid"]]].append(event)
    return rows


def inside(event: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] - 0.01 <= event["ts"] and event["ts"] + event["dur"] <= outer["ts"] + outer["dur"] + 0.01


def test_a_run_becomes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = prepare(tmp_path)
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(config(files)))
    out, png = tmp_path / "trace.json", tmp_path / "trace.png"
    assert (
        main(["trace", str(run), "--steps", "2", "--warmup", "1", "--out", str(out), "--png", str(png), "--save"]) == 0
    )
    shown = capsys.readouterr().out
    assert str(out) in shown
    assert re.search(rf"disk: a checkpoint of .*B in {tmp_path}, removed afterwards\n", shown)
    assert not (tmp_path / "run").exists(), "the run itself has not begun"
    assert png.read_bytes().startswith(b"\x89PNG")

    rows = rows_of(json.loads(out.read_text()))
    assert {"compute", "H2D", "D2H", "AdamW", "data", "checkpoint"} <= rows.keys()
    assert [name for name, events in rows.items() if not events] == []
    steps = [event for event in rows["compute"] if event["cat"] == "step"]
    assert [event["name"] for event in steps] == ["step 2", "step 3"]
    for step in steps:
        mine = [event for event in rows["compute"] if event["cat"] == "compute" and inside(event, step)]
        wanted = {f"{phase} layer {layer}" for phase in ("forward", "backward") for layer in (0, 1)} | {"head"}
        assert Counter(event["name"] for event in mine) == Counter(wanted)
    for event in rows["compute"]:
        assert event["cat"] == "step" or any(inside(event, step) for step in steps), event
    assert {event["name"] for event in rows["AdamW"]} == {"embedding", "layer.0", "layer.1", "head"}
    assert all(event["args"]["bytes"] > 0 for event in rows["H2D"] + rows["D2H"])
    assert {event["name"] for event in rows["checkpoint"]} == {"save"}


def test_a_trace_without_a_save_needs_no_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And names no temporary folder of its own."""
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(config(prepare(tmp_path))))
    assert main(["trace", str(run), "--steps=1", "--warmup=1", "--out", str(tmp_path / "trace.json")]) == 0
    shown = capsys.readouterr().out
    assert "disk" not in shown
    assert "/tmp" not in shown.replace(str(tmp_path), "")


def test_a_shape_becomes_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    words = "--shape tiny --rows 2 --tokens 16 --steps 1 --warmup 1 --device cpu --option threads=1 --option accumulation_steps=2"
    assert main(["trace", *words.split(), "--out", str(out)]) == 0
    rows = rows_of(json.loads(out.read_text()))
    assert sum(event["name"] == "head" for event in rows["compute"]) == 2, "one in each accumulation step"
    assert {event["cat"] for event in rows["AdamW"]} >= {"adamw", "add"}


def test_each_rank_is_a_process_of_the_trace(tmp_path: Path) -> None:
    run, out, png = tmp_path / "run.yaml", tmp_path / "trace.json", tmp_path / "trace.png"
    run.write_text(json.dumps(config(prepare(tmp_path))))
    words = [
        "trace",
        str(run),
        "--run.gpus=2",
        "--steps=1",
        "--warmup=1",
        "--save",
        "--out",
        str(out),
        "--png",
        str(png),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "megatrain", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 2 (traced)") == 1 and png.read_bytes().startswith(b"\x89PNG")
    events = json.loads(out.read_text())["traceEvents"]
    titles = {e["pid"]: e["args"]["name"].split(":")[0] for e in events if e["name"] == "process_name"}
    assert titles == {1: "rank 0", 2: "rank 1"}
    for pid in titles:
        mine = [event for event in events if event["pid"] == pid and event["ph"] == "X"]
        assert {"step", "compute", "h2d", "d2h", "adamw"} <= {event["cat"] for event in mine}
        rows = [e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == pid]
        assert {event["tid"] for event in mine} <= set(rows) and len(set(rows)) == len(rows)
    steps = [event for event in events if event.get("cat") == "step"]
    assert max(e["ts"] for e in steps) < min(e["ts"] + e["dur"] for e in steps), "the ranks' steps overlap: one clock"
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trace"], "needs RUN.yaml"),
        (["trace", "run.yaml", "--shape", "tiny"], "takes no config"),
        (["trace", "run.yaml", "--device", "cpu"], "--device: is an option of --shape"),
        (["trace", "run.yaml", "--gpus", "2"], "--gpus: is an option of --shape"),
        (["trace", "run.yaml", "--rows", "8"], "--rows: is an option of --shape"),
        (["trace", "run.yaml", "--option", "accumulation_steps=2"], "--option: is an option of --shape"),
        (["trace", "--shape", "tinny"], "unknown shape"),
        (["trace", "--shape", "tiny", "--optim.learning_rate", "1"], "takes no config"),
    ],
)
def test_wrong_arguments_are_user_errors(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_an_unwritable_file_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--shape tiny --rows 1 --tokens 8 --steps 1 --warmup 1 --device cpu --option threads=1"
    assert main(["trace", *words.split(), "--out", str(tmp_path / "no" / "trace.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_overlapping_spans_get_separate_lines_and_inner_ones_are_clipped() -> None:
    spans = [
        Span("step", "step 1", 10.0, 20.0),
        Span("compute", "forward layer 0", 11.0, 12.0),
        Span("wait", "weights", 11.5, 12.000004),  # measured to microseconds
        Span("adamw", "layer.0", 10.0, 12.0, 10),
        Span("adamw", "layer.1", 11.0, 13.0, 10),
        Span("adamw", "layer.2", 12.0, 14.0, 10),
        Span("h2d", "layer.0", 11.0, 12.000005, 10),
        Span("h2d", "layer.1", 12.0, 13.0, 10),
    ]
    rows = rows_of(chrome_trace(spans, "x"))
    assert [event["name"] for event in rows["AdamW"]] == ["layer.0", "layer.2"]
    assert [event["name"] for event in rows["AdamW 2"]] == ["layer.1"]
    assert rows["D2H"] == []
    first, second = rows["H2D"]
    assert first["ts"] + first["dur"] == pytest.approx(second["ts"])
    step, forward, wait = rows["compute"]
    assert inside(forward, step)
    assert inside(wait, forward)
    assert wait["name"] == "wait for weights"

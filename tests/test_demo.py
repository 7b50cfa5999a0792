"""The demo, cut short: what it leaves behind, and that it can be run again."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

from megatrain.metrics.record import read_records

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", os.environ.get("TOKENIZERS_PARALLELISM", "false"))
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_short_demo_learns_saves_and_writes(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = [f"--text={demo.STANDARD_LIBRARY}/a*.py"]  # a few modules
    demo.main([*text, "--steps=6", "--rows-per-step=2"])
    shown = capsys.readouterr().out
    run = Path("runs/demo/1/run")
    losses = [record.loss for record in read_records(run / "metrics.jsonl") if record.loss is not None]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.3
    first, last = re.search(r"^training loss +(\S+) -> (\S+)$", shown, flags=re.MULTILINE).groups()  # type: ignore[union-attr]
    assert (float(first), float(last)) == pytest.approx((losses[0], losses[-1]), abs=1e-3)
    plot, checkpoint = (re.search(rf"^{name} +(\S+)$", shown, flags=re.MULTILINE)[1] for name in ("plot", "checkpoint"))  # type: ignore[index]
    assert Path(plot).is_file()
    assert (Path(checkpoint) / "manifest.json").is_file()
    sample = shown.partition("in plain transformers")[2]
    assert demo.PROMPT in sample.partition("\n")[2]

    # once more: a folder of its own, and the first one untouched
    before = {path: path.stat().st_mtime_ns for path in Path("runs/demo/1").rglob("*")}
    demo.main([*text, "--steps=2", "--rows-per-step=1"])
    assert Path("runs/demo/2/run/loss.png").is_file()
    assert {path: path.stat().st_mtime_ns for path in Path("runs/demo/1").rglob("*")} == before

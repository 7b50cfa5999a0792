"""On two CUDA devices, or four: streams delayed at random change no bit, and losses follow those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rank_gpu_child import CASES, RankGpuCase

pytestmark = pytest.mark.multi_gpu

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests/support"
LIMIT_S = 280


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], str]:
    """The results by case, and the end of the processes' output. RANKS_DEVICE=cpu rehearses it; RANKS_GPUS: 2 or 4."""
    file = tmp_path_factory.mktemp("gpu") / "results.jsonl"
    path = os.pathsep.join([str(ROOT / "src"), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", os.environ.get("RANKS_GPUS", "2")]
    command += [str(SUPPORT / "rank_gpu_child.py"), str(file), "--device", os.environ.get("RANKS_DEVICE", "cuda")]
    with (file.parent / "output").open("w+") as output:
        try:
            code: int | str = subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": path},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none: killed after {LIMIT_S} s"
    lines = file.read_text().splitlines() if file.exists() else []
    said = (file.parent / "output").read_text()[-6000:]
    return {row["case"]: row for row in map(json.loads, lines)}, f"exit code {code}\n{said}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_delays_change_no_bit_and_losses_follow_one_device(
    case: RankGpuCase, results: tuple[dict[str, dict[str, Any]], str]
) -> None:
    rows, said = results
    assert str(case) in rows, said
    found = rows[str(case)]
    assert "error" not in found, found["error"]
    assert found["same_bits"], "streams with random delays computed something else"
    assert found["losses"] == pytest.approx(found["alone"], rel=case.tolerance)

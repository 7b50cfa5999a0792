"""On one CUDA device the mesh engine, at world size 1, follows the host engine, which computes the same steps on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mesh_gpu_child import CASES, GpuCase

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests/support"
LIMIT_S = 280


@dataclass(frozen=True)
class Child:
    """The outcome of the process on the GPU.

    Attributes:
        results: By case; those after a crash are missing.
        last_words: Exit code and the end of its output, for failure messages.
    """

    results: dict[str, dict[str, Any]]
    last_words: str


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Child:
    """All cases run in one process, because starting it takes longer than the cases."""
    file = tmp_path_factory.mktemp("gpu") / "results.jsonl"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-X", "faulthandler", str(SUPPORT / "mesh_gpu_child.py"), str(file)]
    command += ["--device", os.environ.get("MESH_GPU_DEVICE", "cuda")]
    with (file.parent / "output").open("w+") as output:
        try:
            code: int | str = subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_S
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none: killed after {LIMIT_S} s"
    lines = file.read_text().splitlines() if file.exists() else []
    said = (file.parent / "output").read_text()[-6000:]
    return Child({row["case"]: row for row in map(json.loads, lines)}, f"exit code {code}\n{said}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_match_the_host_engines(case: GpuCase, child: Child) -> None:
    found = child.results.get(str(case))
    assert found is not None, f"the process on the GPU ended before this case: {child.last_words}"
    assert "error" not in found, found["error"]
    assert found["types"] == ["torch.float32"]
    loss_tolerance, norm_tolerance = (5e-3, 3e-2) if case.dtype == "bf16" else (1e-4, 1e-3)
    assert found["losses"] == pytest.approx(found["want_losses"], rel=loss_tolerance)
    assert found["norms"] == pytest.approx(found["want_norms"], rel=norm_tolerance)

"""A trainer that is killed or stopped at random moments loses nothing; see kill_harness.py, which also runs longer by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kill_harness


def test_killed_and_resumed_runs_end_like_undisturbed_ones(tmp_path: Path) -> None:
    """Runs in a separate process: the trainers are forked, and pytest's process may have threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [
        sys.executable,
        kill_harness.__file__,
        "--kills=4",
        "--steps=5",
        "--seed=3",
        "--signals=TERM,KILL",
        f"--folder={tmp_path}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kills" in done.stdout
    assert " 0 of them during a save" not in done.stdout

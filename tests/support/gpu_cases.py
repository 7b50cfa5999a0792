"""The loop of the GPU tests' child processes: run cases one by one, each with a time limit, and write a line of JSON for each."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

CASE_LIMIT_S = 120
T = TypeVar("T")


def arguments(about: str | None) -> argparse.Namespace:
    """`results`, the file for the lines, and `device`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def run_cases(cases: Iterable[T], run: Callable[[T], dict[str, Any]], results: Path, writes: bool = True) -> None:
    """Append each case's result, or its traceback, to `results` as soon as it ends. A case that hangs ends the process.

    `writes`: False runs the cases and writes nothing, on all ranks but one.
    """
    faulthandler.enable()
    for case in cases:
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
        try:
            found = run(case)
        except BaseException:
            found = {"error": traceback.format_exc()}
            print(found["error"], flush=True)
        faulthandler.cancel_dump_traceback_later()
        if writes:
            with results.open("a") as file:
                file.write(json.dumps({"case": str(case), **found}) + "\n")
        gc.collect()

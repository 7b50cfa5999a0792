"""benchmarks/layer_budget.py measures each activation memory budget on its own compiled graph."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/layer_budget.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("layer_budget", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="rehearses the script on a CPU")
def test_a_smaller_budget_saves_fewer_bytes(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler's partitioner, which decides what is saved, and without its code generator, which takes minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    saved = script.main("tiny", 2, 64, [1.0, 0.5, 0.2])
    assert saved[1.0] > saved[0.5] > saved[0.2] > 0


def test_budgets_that_share_a_graph_are_refused(script: ModuleType) -> None:
    script.check_budgets({1.0: 30, 0.2: 10, 0.5: 20})
    with pytest.raises(SystemExit, match=r"budget 0.5 saves 30 bytes"):
        script.check_budgets({1.0: 30, 0.5: 30, 0.2: 10})

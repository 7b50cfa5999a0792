"""megatrain: train Hugging Face language models far larger than the GPU's memory, in true fp32 precision.

The names below are the public API. They are imported on first use, so that `import megatrain` (and `megatrain --help`)
stays instant: torch and transformers take seconds to import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain.config.load import load_config as load_config
    from megatrain.config.schema import RunConfig as RunConfig
    from megatrain.engine.base import EvalResult as EvalResult
    from megatrain.engine.base import StepResult as StepResult
    from megatrain.engine.host.engine import HostEngine as HostEngine
    from megatrain.engine.objective import Objective as Objective
    from megatrain.engine.plan import ExecutionPlan as ExecutionPlan
    from megatrain.errors import EngineClosed as EngineClosed
    from megatrain.errors import MegatrainError as MegatrainError
    from megatrain.errors import NumericStop as NumericStop
    from megatrain.errors import PlanRefused as PlanRefused
    from megatrain.errors import UserError as UserError
    from megatrain.optim.adamw import AdamW as AdamW
    from megatrain.optim.spec import OptimizerSpec as OptimizerSpec
    from megatrain.optim.spec import ParamGroup as ParamGroup
    from megatrain.optim.spec import StateSpec as StateSpec
    from megatrain.planner.run import plan as plan
    from megatrain.run.evaluate import evaluate as evaluate
    from megatrain.run.loop import train as train
    from megatrain.run.prepare import check as check

__version__ = "0.1.0"

_HOME = {
    "AdamW": "megatrain.optim.adamw",
    "EngineClosed": "megatrain.errors",
    "EvalResult": "megatrain.engine.base",
    "ExecutionPlan": "megatrain.engine.plan",
    "HostEngine": "megatrain.engine.host.engine",
    "MegatrainError": "megatrain.errors",
    "NumericStop": "megatrain.errors",
    "Objective": "megatrain.engine.objective",
    "OptimizerSpec": "megatrain.optim.spec",
    "ParamGroup": "megatrain.optim.spec",
    "PlanRefused": "megatrain.errors",
    "RunConfig": "megatrain.config.schema",
    "StateSpec": "megatrain.optim.spec",
    "StepResult": "megatrain.engine.base",
    "UserError": "megatrain.errors",
    "check": "megatrain.run.prepare",
    "evaluate": "megatrain.run.evaluate",
    "load_config": "megatrain.config.load",
    "plan": "megatrain.planner.run",
    "train": "megatrain.run.loop",
}

__all__ = [*_HOME, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

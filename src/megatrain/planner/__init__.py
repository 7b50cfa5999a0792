"""The planner: what goes where, what is kept, how a step is cut, and what that costs; before anything is allocated."""

from megatrain.planner.choice import Caps, Options, StepSize
from megatrain.planner.model_cost import ModelShape, shape_of
from megatrain.planner.plan import Plan, caps_for, plan

__all__ = ["Caps", "ModelShape", "Options", "Plan", "StepSize", "caps_for", "plan", "shape_of"]

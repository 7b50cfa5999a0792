"""Measuring training steps: of a shape, beside the plan, and beside what the same layers take when nothing has to wait."""

from megatrain.commands.bench.report import Report, report_json
from megatrain.commands.bench.run import bench, engine_for, plan_overrides, random_batch
from megatrain.commands.bench.shapes import CONFIGS, QWEN3, QWEN25_7B

__all__ = [
    "CONFIGS",
    "QWEN3",
    "QWEN25_7B",
    "Report",
    "bench",
    "engine_for",
    "plan_overrides",
    "random_batch",
    "report_json",
]

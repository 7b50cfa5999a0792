"""Cost of the instruments: step times with and without them, alternating in one process.

Use: python benchmarks/instruments_cost.py SHAPE ROWS TOKENS STEPS [option=value ...]
     python benchmarks/instruments_cost.py qwen3-8b 32 1024 12
     python benchmarks/instruments_cost.py qwen3-0.6b 8 1024 60 placement=device activations=keep
     python benchmarks/instruments_cost.py tiny 4 128 200 device=cpu threads=1
The shape is one of `megatrain bench`, placed by the plan; options are fields of ExecutionPlan. Steps with and without instruments
alternate in pairs, so that a slow drift of the machine affects both; the cost is the median of the pairs' differences.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from megatrain.commands.work import Work, engine_for, plan_overrides, random_batch

WARM_UP = 4


def main(shape: str, rows: int, tokens: int, steps: int, words: list[str]) -> None:
    device = next((word.removeprefix("device=") for word in words if word.startswith("device=")), "auto")
    options = plan_overrides([word for word in words if not word.startswith("device=")])
    with engine_for(Work(shape, rows, tokens, device, overrides=options, say=print)) as engine:
        vocabulary = engine.config.get_text_config().vocab_size
        seconds: dict[bool, list[float]] = {True: [], False: []}
        figures: Any = None
        for number in range(WARM_UP + 2 * steps):
            on = (number % 2 == 0) ^ (number // 2 % 2 == 1)  # on off, off on, so that each is second equally often
            engine.instruments.on = on
            batch = random_batch(vocabulary, rows, tokens, number)
            started = time.perf_counter()  # the engine's own `seconds` end before the figures are computed
            result = engine.train_step(batch)
            figures = result.pipeline or figures
            if number >= WARM_UP:
                seconds[on].append(time.perf_counter() - started)
        print("figures of a step:", figures)
        differences = [a - b for a, b in zip(seconds[True], seconds[False], strict=True)]
        off, cost = statistics.median(seconds[False]), statistics.median(differences)
        print(
            f"{shape} {rows}x{tokens} {options}: {off * 1e3:.2f} ms a step without instruments, "
            f"{statistics.median(seconds[True]) * 1e3:.2f} ms with them; cost {cost * 1e3:+.3f} ms, {cost / off:+.2%} "
            f"(middle half of the pairs: {_quarter(differences, 0):+.2e} to {_quarter(differences, 2):+.2e} s)"
        )


def _quarter(values: list[float], which: int) -> float:
    return statistics.quantiles(values, n=4)[which]


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5:])

"""Step records for tests."""

from __future__ import annotations

from dataclasses import replace

from megatrain.metrics.record import StepRecord


def record(step: int, **changes: object) -> StepRecord:
    plain = StepRecord(
        step=step,
        epoch=step / 10,
        loss=2.5,
        grad_norm=1.0,
        learning_rate=1e-5,
        rows=4,
        processed_tokens=4000,
        trained_tokens=3000,
        step_s=2.0,
        data_wait_s=0.1,
        split_s={"forward": 0.5},
        processed_tokens_per_s=2000.0,
        trained_tokens_per_s=1500.0,
        elapsed_s=2.0 * step,
        unix_time_s=1.7e9,
        host_rss_bytes=1 << 30,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]

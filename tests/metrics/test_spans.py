"""Interval arithmetic, and the figures of a step that follow from its spans."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.metrics.record import Link, PipelineRecord, pipeline_from, pipeline_of, with_shares
from megatrain.metrics.spans import Span, common, gaps, length, union

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda p: (p[0], p[0] + p[1])), max_size=8)


def seconds_of(intervals: list[tuple[int, int]]) -> set[int]:
    """The slow reference: whole seconds that are covered."""
    return {second for start, end in intervals for second in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_intervals_follow_sets_of_seconds(ones: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    assert length(union(ones)) == len(seconds_of(ones))
    assert common(union(ones), union(others)) == len(seconds_of(ones) & seconds_of(others))
    assert length(gaps((5, 30), union(ones))) == len(set(range(5, 30)) - seconds_of(ones))


STEP = Span("step", "step 7", 100.0, 110.0)


def test_a_step_without_waits_is_all_work_and_hides_its_copies() -> None:
    found = pipeline_of([STEP, Span("h2d", "layer.0", 101.0, 103.0, 8_000_000_000)], adamw_bytes=28)
    assert (found.computed_s, found.waited_s, found.overlap) == (10.0, {}, 1.0)
    assert found.h2d == Link(bytes=8_000_000_000, busy_s=2.0, gbps=4.0)
    assert found.d2h is None
    assert found.adamw_params_per_s is None


def test_copies_are_hidden_where_the_device_works_inside_the_step() -> None:
    """A second of waiting, and two seconds behind the step's end: 3 of 6 seconds of copying are hidden."""
    spans = [
        STEP,
        Span("wait", "weights", 103.0, 104.0),
        Span("h2d", "layer.1", 102.0, 104.0, 1),
        Span("d2h", "layer.1", 108.0, 112.0, 1),
    ]
    found = pipeline_of(spans, adamw_bytes=28)
    assert found.computed_s == 9.0
    assert found.waited_s == {"weights": 1.0}
    assert found.overlap == pytest.approx(3 / 6)


def test_copies_in_both_directions_at_once_count_their_time_once() -> None:
    spans = [
        STEP,
        Span("h2d", "a", 101.0, 103.0, 1),
        Span("d2h", "b", 101.0, 103.0, 1),
        Span("wait", "weights", 101.0, 102.0),
    ]
    assert pipeline_of(spans, adamw_bytes=28).overlap == 0.5


def test_waits_are_summed_by_what_is_waited_for_and_the_switch_is_their_median() -> None:
    waits = [("weights", 0.1), ("weights", 0.3), ("weights", 0.2), ("slabs", 0.5), ("optimizer", 0.7), ("weights", 0.3)]
    spans = [Span("wait", name, 101.0 + i, 101.0 + i + seconds) for i, (name, seconds) in enumerate(waits)]
    found = pipeline_of([*spans, STEP], adamw_bytes=28)
    assert found.waited_s == pytest.approx({"weights": 0.6, "slabs": 0.5, "optimizer": 1.0})
    assert found.slot_switch_s == pytest.approx(0.2)
    assert found.computed_s == pytest.approx(10 - 2.1)


def test_a_copy_that_waited_for_an_update_is_a_wait_for_the_optimizer() -> None:
    spans = [STEP, Span("wait", "weights", 103.0, 104.0), Span("wait", "optimizer", 101.0, 103.0)]
    found = pipeline_of(spans, adamw_bytes=28)
    assert (found.waited_s, found.slot_switch_s) == ({"optimizer": 3.0}, None)


def test_adamw_is_measured_while_it_runs_on_any_unit() -> None:
    """Two units side by side and one alone: 3 seconds, 6e9 parameters."""
    spans = [
        STEP,
        Span("adamw", "layer.0", 90.0, 92.0, 2_000_000_000),
        Span("adamw", "layer.1", 91.0, 92.0, 1_000_000_000),
        Span("adamw", "layer.2", 95.0, 96.0, 3_000_000_000),
    ]
    found = pipeline_of(spans, adamw_bytes=26)
    assert found.adamw_params_per_s == pytest.approx(2e9)
    assert found.adamw_gbps == pytest.approx(52.0)


def test_shares_are_missing_where_nothing_was_measured() -> None:
    record = PipelineRecord(computed_s=1.0, h2d=Link(bytes=10, busy_s=1.0, gbps=30.0), adamw_gbps=40.0)
    found = with_shares(record, h2d_gbps=50.0, d2h_gbps=50.0, host_gbps=80.0)
    assert found.h2d is not None
    assert (found.h2d.share, found.d2h, found.adamw_share) == (0.6, None, 0.5)
    unknown = with_shares(record, h2d_gbps=None, d2h_gbps=None, host_gbps=None)
    assert unknown == record


def test_a_record_survives_its_json() -> None:
    record = PipelineRecord(
        computed_s=1.0,
        waited_s={"weights": 0.5},
        h2d=Link(bytes=10, busy_s=1.0, gbps=30.0, share=0.5),
        policy="recompute 4",
        ladder=("batch.microbatch_rows: 1",),
    )
    assert pipeline_from({**orjson.loads(orjson.dumps(record)), "of a newer version": 1}) == record

"""The order of a step's visits is known before it starts, and finds every layer's input where it needs it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatrain.engine.host.fetch_order import backward_fetch_order, forward_fetch_order, training_fetch_order

LAYERS = st.integers(1, 20)


def test_small_lists() -> None:
    assert forward_fetch_order(3) == [0, 1, 2]
    assert backward_fetch_order(3, 1) == [2, 1, 0]
    # layers 2 and 0 are computed again for the inputs of 3 and 1
    assert backward_fetch_order(4, 2) == [2, 3, 2, 0, 1, 0]
    assert backward_fetch_order(5, 3) == [3, 4, 3, 0, 1, 2, 1, 0]
    assert training_fetch_order(2, 1, 2) == [0, 1, 1, 0, 0, 1, 1, 0]


@given(LAYERS, st.integers(1, 25), st.integers(1, 3))
def test_every_window_goes_forward_once_and_backward_through_the_segments(
    layers: int, segment: int, accumulation_steps: int
) -> None:
    forward, backward = forward_fetch_order(layers), backward_fetch_order(layers, segment)
    assert training_fetch_order(layers, segment, accumulation_steps) == (forward + backward) * accumulation_steps
    inner = sum(min(segment, layers - start) - 1 for start in range(0, layers, segment))
    assert len(backward) == layers + inner


@given(LAYERS, st.integers(1, 25))
def test_a_layer_s_backward_finds_its_input_and_the_gradient_of_its_output(layers: int, segment: int) -> None:
    """Replays the list: kept inputs are those of every K-th layer; computing a layer again gives the next one's input."""
    inputs = set(range(0, layers, segment))
    waiting = layers - 1  # whose output gradient is complete
    recomputed_from: int | None = None
    for visit in backward_fetch_order(layers, segment):
        assert visit in inputs, f"layer {visit} has no input"
        end_of_segment = min((visit // segment + 1) * segment, layers) - 1
        if visit == waiting and (visit == end_of_segment or recomputed_from != visit - 1):
            waiting -= 1
        else:
            assert visit + 1 <= end_of_segment, "nothing is computed again across a segment's end"
            inputs.add(visit + 1)
            recomputed_from = visit
    assert waiting == -1, "every layer had its backward"

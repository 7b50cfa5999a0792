"""The order of a step's visits is known before it starts, and finds every layer's input where it needs it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatrain.executor.visits import backward_visits, forward_visits, training_visits

LAYERS = st.integers(1, 20)


def test_small_lists() -> None:
    assert forward_visits(3) == [0, 1, 2]
    assert backward_visits(3, 1) == [2, 1, 0]
    # layers 2 and 0 are computed again for the inputs of 3 and 1
    assert backward_visits(4, 2) == [2, 3, 2, 0, 1, 0]
    assert backward_visits(5, 3) == [3, 4, 3, 0, 1, 2, 1, 0]
    assert training_visits(2, 1, 2) == [0, 1, 1, 0, 0, 1, 1, 0]


@given(LAYERS, st.integers(1, 25), st.integers(1, 3))
def test_every_window_goes_forward_once_and_backward_through_the_segments(
    layers: int, segment: int, windows: int
) -> None:
    forward, backward = forward_visits(layers), backward_visits(layers, segment)
    assert training_visits(layers, segment, windows) == (forward + backward) * windows
    inner = sum(min(segment, layers - start) - 1 for start in range(0, layers, segment))
    assert len(backward) == layers + inner


@given(LAYERS, st.integers(1, 25))
def test_a_layer_s_backward_finds_its_input_and_the_gradient_of_its_output(layers: int, segment: int) -> None:
    """Replays the list: kept inputs are those of every K-th layer; computing a layer again gives the next one's input."""
    inputs = set(range(0, layers, segment))
    waiting = layers - 1  # whose output gradient is complete
    recomputed_from: int | None = None
    for visit in backward_visits(layers, segment):
        assert visit in inputs, f"layer {visit} has no input"
        end_of_segment = min((visit // segment + 1) * segment, layers) - 1
        if visit == waiting and (visit == end_of_segment or recomputed_from != visit - 1):
            waiting -= 1
        else:
            assert visit + 1 <= end_of_segment, "nothing is computed again across a segment's end"
            inputs.add(visit + 1)
            recomputed_from = visit
    assert waiting == -1, "every layer had its backward"

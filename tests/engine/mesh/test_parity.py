"""Every layout computes what one process computes: loss, global norm, every gradient, and weights after three clipped steps."""

from __future__ import annotations

import pytest

from mesh_cases import MIXTURE, matrix
from mesh_parity import differences, on_ranks, plain


@pytest.mark.parametrize("case", [*matrix(), *MIXTURE], ids=str)
def test_a_layout_is_one_process(case):
    """The norm counts each element once, whatever stages and replicas there are; after the three steps all ranks that hold a
    copy of a part hold the same bytes (`on_ranks`)."""
    found = differences(on_ranks(case), plain(case))
    assert not found, "\n".join(found)

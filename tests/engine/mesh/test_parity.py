"""Any layout computes what one process computes: loss, global norm, every gradient, and the weights after three clipped steps."""

from __future__ import annotations

import pytest

from mesh_cases import MIXTURE, matrix
from mesh_parity import differences, on_ranks, plain


@pytest.mark.parametrize("case", [*matrix(), *MIXTURE], ids=str)
def test_a_layout_is_one_process(case):
    """Case 40: one norm over distinct elements, whatever stages and replicas there are. Case 41: after the three steps the
    bytes of every copy of every part are compared over all ranks (`on_ranks`)."""
    found = differences(on_ranks(case), plain(case))
    assert not found, "\n".join(found)

"""The families whose parity with plain Hugging Face is part of the test suite (tests/executor/test_parity.py keeps it true)."""

from __future__ import annotations

TESTED: frozenset[str] = frozenset()

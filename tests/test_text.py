"""What a name or a sample may not do to a terminal, a log or a line of YAML."""

from __future__ import annotations

import unicodedata

import pytest

from megatrain.text import one_line, printable, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b31m", r"\x9b31m"),
        ("file\u202etxt.exe", r"file\u202etxt.exe"),
        ("\u2066a\u2069", r"\u2066a\u2069"),
        ("bell\a back\b\b return\r", r"bell\x07 back\x08\x08 return\x0d"),
        ("line\u2028line\u2029", r"line\u2028line\u2029"),
        ("in\u200bvis\ufeffible", r"in\u200bvis\ufeffible"),
        ("tag\U000e0041", r"tag\U000e0041"),
        (b"not \xff utf-8".decode("utf-8", "surrogateescape"), r"not \xff utf-8"),
        ("\ud83d alone", r"\ud83d alone"),
    ],
)
def test_what_steers_a_terminal_is_shown_as_its_code(text: str, shown: str) -> None:
    assert visible(text) == shown
    shown.encode()  # and can be written


@pytest.mark.parametrize("text", ["żółw", "中文", "שלום", "हिन्दी\u200d", "👩‍🚀", "a\tb\n  c", "\u00a0", "█⟦⟧"])
def test_ordinary_text_stays(text: str) -> None:
    assert printable(text) == visible(text) == text


def test_no_character_of_the_dangerous_kinds_is_left() -> None:
    """Every control character and every mark of direction that Unicode knows, but tab and newline."""
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    kinds = {"Cc", "Cs", "Zl", "Zp"}
    every = map(chr, range(0x110000))
    bad = [c for c in every if unicodedata.category(c) in kinds or unicodedata.bidirectional(c) in directions]
    bad += ["\u200e", "\u200f", "\u061c"]
    assert [c for c in bad if c not in "\t\n" and visible(c) == c] == []


def test_a_message_has_one_line_that_is_not_indented() -> None:
    assert (
        printable("a.jsonl\nerror: none: bad\n  -> look\n    there\n")
        == "a.jsonl\\nerror: none: bad\n  -> look\n    there\n"
    )


def test_a_name_in_a_line_stays_in_it() -> None:
    assert one_line("a\n  b\tc\x1b") == r"a\n  b\tc\x1b"

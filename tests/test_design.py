"""docs/design.md and docs/extending.md show code and names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "megatrain"
TEXT = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
EXCERPTS = re.findall(r"^```python\n# (\S+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
EXTENDING = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n# (tests/\S+)\n(.*?)^```$", EXTENDING, flags=re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_there_are_excerpts_and_each_names_its_file() -> None:
    assert len(EXCERPTS) >= 6
    assert TEXT.count("```python") == len(EXCERPTS)
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize(
    ("file", "code"),
    [(f"src/megatrain/{file}", code) for file, code in EXCERPTS] + EXAMPLES,
    ids=[f"{file} {n}" for n, (file, _) in enumerate(EXCERPTS + EXAMPLES)],
)
def test_every_line_of_an_excerpt_is_in_its_file_in_that_order(file: str, code: str) -> None:
    """Lines that follow each other in the excerpt do so in the file, unless `...` stands between them."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    parts = [part.strip("\n").splitlines() for part in re.split(r"^\s*\.\.\.\n", code, flags=re.MULTILINE)]
    at = 0
    for part in parts:
        places = [i for i in range(at, len(lines) - len(part) + 1) if lines[i : i + len(part)] == part]
        assert places, "not in the file, or not in this order:\n" + "\n".join(part)
        at = places[0] + len(part)


def test_every_path_exists() -> None:
    places = (ROOT, SOURCE, ROOT / "tests" / "engine" / "host", ROOT / "docs")
    found = set(re.findall(r"`([\w/]+\.(?:py|md))`|\]\(([\w./]+)\)", PROSE))
    paths = sorted({a or b for a, b in found})
    assert len(paths) > 20
    assert [p for p in paths if not any((place / p).exists() for place in places)] == []


def test_every_note_is_at_the_top_of_a_file() -> None:
    source = "\n".join(file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py"))
    notes = set(re.findall(r"\[Note: ([^\]]+)\]", TEXT))
    assert notes
    assert [note for note in notes if f"\n[Note: {note}]\n" not in source] == []


def test_every_name_exists() -> None:
    """Names with a capital inside, a dot or an underscore, in backticks."""
    source = "\n".join(file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py"))
    names = set(re.findall(r"`([A-Za-z_]\w*(?:\.[a-z_]\w*)*)(?:\([a-z]*\))?`", PROSE))
    names = {name for name in names if not name.endswith((".py", ".md"))}
    words = {part for name in names for part in name.split(".") if re.search(r"[a-z][A-Z]|_", part)}
    assert len(words) > 20
    assert sorted(word for word in words if not re.search(rf"\b{word}\b", source)) == []

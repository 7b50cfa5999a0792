"""What docs/ promise beside the config: commands run, links lead somewhere, and error texts are those of the program."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from megatrain.commands.main import main
from tiny_run import write_chats, write_model

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))


def _texts_of_the_program() -> str:
    """All string constants of the source; parts of an f-string stand one after another."""
    found: list[str] = []
    for file in (ROOT / "src").rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        found += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(found)


def test_the_errors_that_are_explained_are_errors_of_the_program() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| ", text, flags=re.MULTILINE)
    said = [quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row)]
    assert len(said) > 40
    program = _texts_of_the_program()
    pieces = [piece.strip() for quoted in said for piece in quoted.split("...") if len(piece.strip()) > 3]
    assert [piece for piece in pieces if piece not in program] == []


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def test_every_page_can_be_found_from_the_readme() -> None:
    linked = {page.name for page in DOCS if f"docs/{page.name}" in (ROOT / "README.md").read_text(encoding="utf-8")}
    while (
        more := {p.name for p in DOCS for name in linked if f"({p.name}" in (ROOT / "docs" / name).read_text()} - linked
    ):
        linked |= more
    assert linked == {page.name for page in DOCS}


def test_the_first_steps_are_steps_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("megatrain ")]
    assert [line.split()[1] for line in commands] == ["init", "data", "train", "generate", "eval", "export"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_model(Path("models/SmolLM2-135M-Instruct"), max_position_embeddings=1024)
    Path("data").mkdir()
    write_chats(Path("data/chat.jsonl"), 60)
    for line in commands:
        words = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
        assert main(words.stdout.split("\0")[1:-1]) == 0, line
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
    assert "validation loss" in capsys.readouterr().out

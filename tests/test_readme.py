"""What README, docs and examples promise: every command runs, every config loads, every path exists."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.commands.main import main
from megatrain.config.load import load_config
from megatrain.metrics.record import read_records
from tiny_run import write_chats, write_model, write_texts

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = "\n".join(
    [README, *((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("commands.md", "python.md"))]
)
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MODEL = "models/SmolLM2-135M-Instruct"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES, flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def commands(program: str) -> list[str]:
    """The lines of the shell blocks that call a program, in their order."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if program in line.partition("#")[0].split()]


def command_not_covered() -> list[str]:
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
    covered = {line for program in ("megatrain", "make", "pip") for line in commands(program)}
    return [line for line in lines if line not in covered]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and the data that README talks about, in small."""
    folder = tmp_path_factory.mktemp("readme")
    write_model(folder / MODEL, max_position_embeddings=2048)
    (folder / "docs").symlink_to(ROOT / "docs")
    (folder / "data").mkdir()
    write_chats(folder / "data" / "chat.jsonl", 400)
    (yaml,) = blocks("yaml")
    (folder / "my.yaml").write_text(yaml, encoding="utf-8")
    return folder


def words_of(line: str, place: Path) -> list[str]:
    """The words that bash gives to `megatrain`: quotes, comments and `$(...)` are its business."""
    script = f"megatrain() {{ printf '%s\\0' \"$@\"; }}\nset -euo pipefail\n{line}"
    done = subprocess.run(["bash", "-c", script], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def test_every_command_of_the_pages_is_run_by_a_test_here() -> None:
    assert len(commands("megatrain")) >= 7
    assert command_not_covered() == []


def test_the_commands_of_the_pages_run_in_their_order(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place))  # the tokenised cache is written below it
    for line in commands("megatrain"):
        assert main(words_of(line, place)) == 0, line
    shown = capsys.readouterr().out
    assert shown.count("all checks passed") >= 1
    assert "validation loss" in shown
    run = place / "runs" / "chat"
    layout = next(text for name, text in BLOCKS if name == "" and text.startswith("runs/chat/"))
    named = re.findall(r"^  (\S+)(?:  (\S+\.png))?  ", layout, flags=re.MULTILINE)
    for name in filter(None, sum(named, ())):
        there = name.replace("step_000100/", (run / "checkpoints" / "latest").read_text().strip())
        assert (run / there).exists(), f"docs/commands.md shows {name} in a run's folder"
    assert (place / "runs" / "other" / "checkpoints" / "latest").is_file()
    assert not (place / "runs" / "next").exists(), "`check` makes no run folder"


def test_the_two_process_example_runs_with_the_config_that_init_writes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of docs/parallel.md, word by word, through the real torchrun; the losses are those of one process."""
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^torchrun --nproc-per-node 2 .* --engine mesh .*$", page, flags=re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(place))
    write_texts(tmp_path / "data.jsonl", 60)
    assert main(["init", str(place / MODEL), "data.jsonl"]) == 0
    assert load_config("run.yaml").rows_per_step == 1, "the smallest step there is"
    short = ["--schedule.epochs=null", "--schedule.steps=2", "--schedule.warmup_ratio=0"]
    words = line.split()
    assert words[0] == "torchrun"
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    done = subprocess.run([*torchrun, *words[1:], *short], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert main(["train", "run.yaml", "--run.device=cpu", "--run.dir=runs/one", *short]) == 0
    two, one = ([r.loss for r in read_records(Path("runs", name, "metrics.jsonl"))] for name in ("two", "one"))
    assert len(one) == 2
    assert two == pytest.approx(one, rel=1e-5)


def test_the_python_of_the_pages_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "docs/python.md", "exec"), names)
    loaded = names["model"]
    assert isinstance(loaded, torch.nn.Module)
    start = AutoModelForCausalLM.from_pretrained(place / MODEL)
    moved = [not torch.equal(new, old) for new, old in zip(loaded.parameters(), start.parameters(), strict=True)]
    assert any(moved)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z-]+)", README + CONTRIBUTING))))
def test_make_has_the_targets_that_the_pages_name(target: str) -> None:
    done = subprocess.run(["make", target, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_pip_lines_name_files_that_are_there() -> None:
    lines = re.findall(r"`pip install ([^`]+)`", README)
    assert lines
    for line in lines:
        words = line.split()
        assert (ROOT / words[words.index("-c") + 1]).is_file()
        assert (ROOT / words[-1] / "pyproject.toml").is_file()


def test_ci_runs_tests_and_demo_through_make() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for target in ("lint", "test", "demo"):
        assert f"make {target}\n" in script


def test_links_and_the_tree_of_the_readme_are_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    missing = [link for link in links if not (ROOT / link.partition("#")[0]).exists()]
    for file, _, anchor in (link.partition("#") for link in links if "#" in link):
        headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)
        anchors = [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings]
        missing += [] if anchor in anchors else [f"{file}#{anchor}"]
    tree = next(text for name, text in BLOCKS if name == "" and text.startswith("src/megatrain/"))
    above = {0: ROOT}  # indentation -> the folder that the names at it are in
    for line in tree.splitlines():
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        path = above[indent] / name
        above[indent + 2] = path
        missing += [str(path)] if not path.exists() else []
    assert missing == []


def test_the_tree_of_the_readme_leaves_no_package_out() -> None:
    packages = sorted(path.parent.name for path in (ROOT / "src" / "megatrain").glob("*/__init__.py"))
    assert [name for name in packages if f"  {name}/ " not in README] == []


def test_seven_files_lead_to_the_hot_loop() -> None:
    listed = re.findall(r"^\d\. \[\S+\]\((\S+)\)", README, flags=re.MULTILINE)
    assert len(listed) == 7
    assert "src/megatrain/engine/host/step.py" in listed[:2]
    assert "def gradients(" in (ROOT / "src/megatrain/engine/host/step.py").read_text(encoding="utf-8")


# ---- configs that are shipped


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_shipped_config_loads(path: Path) -> None:
    run = load_config(path)
    assert run.run.dir == f"runs/{path.stem}", "examples do not write into each other's folders"
    assert run.batch.tokens_per_step % run.data.max_tokens == 0


SMALL = ["--batch.tokens_per_step=512", "--data.max_tokens=256", "--schedule.epochs=null", "--schedule.steps=2"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("finetune-chat", ["--eval.every_steps=1"]),
        ("pretrain-text", ["--schedule.warmup_steps=1"]),
        ("large-model", []),
        ("long-rows", []),
    ],
)
def test_every_shipped_config_trains_in_small(
    name: str, words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the files it names, and a step of a few hundred tokens."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "models" / "my-chat-model")
    write_model(tmp_path / "models" / "my-large-model")
    write_model(tmp_path / "models" / "my-long-model")
    write_model(tmp_path / "models" / "my-config", weights=False)
    for folder in ("more", "books", "code/package"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    write_chats(tmp_path / "data" / "chat.jsonl", 200)
    write_chats(tmp_path / "data" / "more" / "chats.jsonl", 20, seed=3)
    (tmp_path / "data" / "books" / "one.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "data" / "code" / "package" / "module.py").write_text("answer = 42\n" * 50)
    write_texts(tmp_path / "data" / "held-out.jsonl", 5)
    cache = ["--data.cache_dir=cache", "--run.threads=1", "--run.device=cpu"]
    assert main(["train", str(ROOT / "examples" / f"{name}.yaml"), *SMALL, *words, *cache]) == 0
    assert (tmp_path / "runs" / name / "checkpoints" / "latest").read_text() == "step_000002\n"


def test_no_shipped_config_is_left_out_of_the_small_runs() -> None:
    assert [path.stem for path in EXAMPLES] == ["finetune-chat", "large-model", "long-rows", "pretrain-text"]


def test_the_example_of_a_loop_trains_what_a_collator_of_transformers_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its losses are those of plain transformers on the same batches, with torch's own AdamW."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model, data = write_model(tmp_path / "model"), write_texts(tmp_path / "data.jsonl", 30)
    spec = importlib.util.spec_from_file_location("own_loop", ROOT / "examples" / "own_loop.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    seen: list[dict[str, torch.Tensor]] = []
    real = example.repeated

    def noting(loader: object) -> Iterator[dict[str, torch.Tensor]]:
        for batch in real(loader):
            seen.append(dict(batch))
            yield batch

    monkeypatch.setattr(example, "repeated", noting)
    losses = example.main(str(model), str(data), str(tmp_path / "out"), 5)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5, weight_decay=0.0)
    for step, (batch, loss) in enumerate(zip(seen, losses, strict=False)):
        want = plain(**batch).loss
        assert loss == pytest.approx(want.item(), rel=1e-5)
        want.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = example.cosine(step, 5)
        optimizer.step()
        optimizer.zero_grad()
    assert len(losses) == 5
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")

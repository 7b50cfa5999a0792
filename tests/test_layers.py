"""Dependencies point one way, and what a command line needs at once does not import torch.

`checkpoint` stands below `executor`: it reads and writes planes by their names and layouts (host, models) and knows of no step,
while the engine's `save` and `load` call it. `metrics`, `data` and `config` know of no engine at all.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatrain

ROOT = Path(megatrain.__file__).parent
ORDER: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("config", "host", "data", "metrics", "loss"),
    ("models",),
    ("device",),
    ("optim",),
    ("checkpoint",),
    ("executor",),
    ("mesh",),
    ("machine",),
    ("planner",),
    ("bench",),
)
"""A package imports from earlier lines only. The modules beside the packages (train, check, cli...) stand above them all."""
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}


def home(module: str) -> str:
    """`megatrain.host_memory.store` -> `host`."""
    return module.split(".")[1]


def imports(file: Path, at_start: bool = False) -> Iterator[str]:
    """Modules of megatrain that a file imports, anywhere or (`at_start`) whenever it is imported itself."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in _at_start(tree) if at_start else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "megatrain":
            if node.module == "megatrain":
                yield from (f"megatrain.{alias.name}" for alias in node.names if not alias.name.startswith("__"))
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("megatrain."))


def _at_start(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from (inner for inner in ast.walk(node) if isinstance(inner, ast.stmt))
        yield node


PACKAGES = sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file())
FRONT = sorted(path.stem for path in ROOT.glob("*.py") if path.stem not in RANK and path.stem != "__init__")


def files_of(name: str) -> list[Path]:
    return sorted((ROOT / name).rglob("*.py")) if (ROOT / name).is_dir() else [ROOT / f"{name}.py"]


@pytest.mark.parametrize("name", sorted({*PACKAGES, *RANK}))
def test_a_package_imports_from_below_only(name: str) -> None:
    assert name in RANK, f"say in ORDER where the package {name} stands"
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in files_of(name)
        for module in imports(file)
        if home(module) != name and RANK.get(home(module), len(ORDER)) >= RANK[name]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_front_has_no_cycles() -> None:
    """Of imports that happen when a module is imported; a command may import what it runs when it runs it."""
    below = {name: {home(m) for m in imports(ROOT / f"{name}.py", at_start=True)} & set(FRONT) for name in FRONT}
    while leaves := [name for name, needed in below.items() if not needed & below.keys()]:
        for name in leaves:
            del below[name]
    assert not below, f"these import each other: {sorted(below)}"


def test_nothing_stands_on_the_command_line() -> None:
    users = [file.stem for file in ROOT.rglob("*.py") if "megatrain.commands.main" in set(imports(file))]
    assert users == ["__main__"]


def test_what_every_command_needs_imports_no_torch() -> None:
    modules = "megatrain, megatrain.commands.main, megatrain.errors, megatrain.config.load, megatrain.run.ledger"
    code = f"import sys, {modules}; print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_config_data_and_metrics_know_of_no_engine() -> None:
    for name in ("config", "data", "metrics"):
        used = {home(module) for file in files_of(name) for module in imports(file)}
        assert used <= {name, "errors"}, used

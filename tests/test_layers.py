"""Dependencies point one way, between packages and inside them, and a command line imports no torch before it needs it.

`checkpoint` is below `engine`: it reads and writes planes by name and layout and knows nothing of a step; the engines' `save` and
`load` call it. `metrics`, `data` and `config` know no engine at all.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import megatrain

ROOT = Path(megatrain.__file__).parent
ORDER: tuple[tuple[str, ...], ...] = (
    ("errors", "text", "units"),
    ("paths",),
    ("config",),
    ("host_memory", "data", "metrics"),
    ("models",),
    ("device",),
    ("optim",),
    ("checkpoint",),
    ("engine",),
    ("machine",),
    ("planner",),
    ("run",),
    ("commands",),
)
"""A package imports only from its own line's package and from earlier lines."""
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
FILES = sorted(ROOT.rglob("*.py"))


def module_name(file: Path) -> str:
    """`.../megatrain/engine/host/step.py` -> `megatrain.engine.host.step`; a package's `__init__` is the package."""
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Every statement below a node, function bodies included; not what only the type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.stmt):
            yield child
        yield from statements(child)


def imports(file: Path) -> set[str]:
    """Modules of megatrain that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in statements(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatrain":
            assert node.level == 0, f"{file}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "megatrain"}
    return found - {"megatrain", module_name(file)}


GRAPH = {name: imports(file) for name, file in MODULES.items()}


def package(module: str) -> str:
    """`megatrain.host_memory.store` -> `host_memory`."""
    return module.split(".")[1]


def test_the_top_level_holds_packages_and_six_modules() -> None:
    modules = {path.stem for path in ROOT.glob("*.py")}
    assert modules == {"__init__", "__main__", "errors", "paths", "text", "units"}
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert packages | {"errors", "paths", "text", "units"} == set(RANK), "say in ORDER where a package stands"


@pytest.mark.parametrize("name", sorted(RANK))
def test_a_package_imports_from_below_only(name: str) -> None:
    wrong = [
        f"{module} imports {used}"
        for module, uses in GRAPH.items()
        if module != "megatrain" and not module.endswith("__main__") and package(module) == name
        for used in sorted(uses)
        if package(used) != name and RANK[package(used)] >= RANK[name]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_takes_part_in_an_import_cycle() -> None:
    """Imports inside functions count: a late import that hides a cycle hides a missing contract."""
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail(" imports\n".join(reversed(error.args[1])))


def test_the_contracts_of_the_engines_know_neither_engine_and_the_engines_not_each_other() -> None:
    def part(module: str) -> str:
        names = module.split(".")
        return names[2] if len(names) > 3 or module in ("megatrain.engine.host", "megatrain.engine.mesh") else ""

    wrong = [
        f"{module} imports {used}"
        for module, uses in GRAPH.items()
        for used in uses
        if module.startswith("megatrain.engine") and used.startswith("megatrain.engine.")
        if part(used) and part(used) != part(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_command_line() -> None:
    assert [name for name, uses in GRAPH.items() if "megatrain.commands.main" in uses] == ["megatrain.__main__"]


def test_no_engine_is_typed_any() -> None:
    pattern = re.compile(r"\bengine: (Any|object)\b")
    assert [name for name, file in MODULES.items() if pattern.search(file.read_text(encoding="utf-8"))] == []


def test_every_command_starts_without_torch() -> None:
    modules = "megatrain, megatrain.commands.main, megatrain.errors, megatrain.config.load, megatrain.units"
    code = f"import sys, {modules}; print([m for m in ('torch', 'transformers', 'numba') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_config_data_and_metrics_know_no_engine() -> None:
    for name in ("config", "data", "metrics"):
        used = {
            package(u)
            for module, uses in GRAPH.items()
            for u in uses
            if module != "megatrain" and package(module) == name
        }
        assert used <= {name, "config", "errors", "paths", "text", "units"}, used

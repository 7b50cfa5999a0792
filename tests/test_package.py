"""The public face of the package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import megatrain as mt


def test_importing_the_package_and_asking_for_help_imports_no_torch() -> None:
    code = "import sys; from megatrain.commands import main; main.parser().format_help(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("name", mt.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(mt, name) is not None
    assert name in dir(mt)


def test_no_module_is_named_like_a_public_name() -> None:
    """Importing it would replace the public function by the module."""
    assert not [name for name in mt.__all__ if importlib.util.find_spec(f"megatrain.{name}")]


def test_the_list_of_public_names_is_the_table_of_their_homes() -> None:
    assert set(mt.__all__) == {*mt._HOME, "__version__"}


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        mt.trian  # noqa: B018

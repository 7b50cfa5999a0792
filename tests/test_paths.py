"""Names from files are plain relative paths, and what they lead to is a regular file of the folder, or nothing is opened."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megatrain.errors import UserError
from megatrain.paths import (
    file_problem,
    name_problem,
    open_regular,
    parse_json,
    read_json,
    read_limited,
    refuse_names,
    regular_file,
)

PLAIN = [
    "model.safetensors",
    "state/layer.0.safetensors",
    "a/b/c",
    "日本語.md",
    "with space.txt",
    "..a",
    "a..b",
    ".hidden",
    "ñ",
]
EVIL = [
    "", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "./x", "a/./x", "a//b", "a/", "//x", "~\x00", "a\x00b",
    "..\\x", "a\\b", "C:\\x", "C:x", "a\nb", "a\x1b[31m", "\u202egpj.exe", "\u200bx", "\ud800", "\ue000", "\uff0e\uff0e/x",
    "\u2025/x", "\uff0fetc\uff0fpasswd", "a\uff3cb", " x", "x ", "a/ x", "x" * 256, "a/" * 600 + "x",
    None, 1, 1.5, True, [], {}, b"x",
]  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_names(name: str) -> None:
    assert name_problem(name) is None


@pytest.mark.parametrize("name", EVIL, ids=lambda name: ascii(name)[:24])
def test_names_that_are_refused(name: object) -> None:
    assert name_problem(name) is not None
    with pytest.raises(UserError) as caught:
        refuse_names(["fine", name], "list.json")
    assert str(caught.value).startswith("list.json: names ")
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable() or str(caught.value).count("\n") == 1


@pytest.mark.parametrize(
    "names", [["a", "A"], ["x/é", "x/e\u0301"], ["straße", "STRASSE"], ["a", "a/b"], ["A/b", "a"], ["a/b", "a/B"]]
)
def test_names_that_collide(names: list[str]) -> None:
    assert all(name_problem(name) is None for name in names)
    with pytest.raises(UserError, match=r"the same file on some systems|as a file and as a folder"):
        refuse_names(names, "list.json")


def make_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "file").write_text("inside")
    (tmp_path / "secret").write_text("private")
    return folder


def test_what_a_name_may_lead_to(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    links = {
        "link": "file", "up_and_in": "../folder/file", "sub/up": "../file", "out": "../secret", "absolute": "/etc/hostname",
        "chain": "out", "zero": "/dev/zero", "dangling": "nowhere", "circle": "circle", "etc": "/etc",
    }  # fmt: skip
    for name, target in links.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.path.relpath(folder / "socket"))
    server.close()
    assert [name for name in ("file", "link", "up_and_in", "sub/up") if file_problem(folder, name)] == []
    problems = {
        "out": "leads out of its folder", "absolute": "leads out", "chain": "leads out", "zero": "leads out",
        "etc/hostname": "leads out", "dangling": "leads to nothing", "circle": "in a circle|Too many levels", "pipe": "a pipe",
        "socket": "a socket", "sub": "a folder", "missing": "missing", "a\0b": "null|NUL|cannot", "x" * 300: "too long",
    }  # fmt: skip
    for name, words in problems.items():
        assert any(word in (file_problem(folder, name) or "") for word in words.split("|")), (name, words)
        with pytest.raises(UserError):
            regular_file(folder, name)


def test_a_folder_that_is_itself_a_link(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "alias").symlink_to("folder")
    (tmp_path / "folder" / "link").symlink_to("file")
    assert file_problem(tmp_path / "alias", "link") is None
    assert file_problem(tmp_path / "alias", "../secret") is not None


def test_links_of_the_hubs_cache(tmp_path: Path) -> None:
    """A snapshot's files are links to the blobs of the same repository; to other repositories there is no way."""
    repository = tmp_path / "models--org--name"
    snapshot, other = repository / "snapshots" / "0f1", tmp_path / "models--org--other" / "blobs"
    for folder in (snapshot / "sub", repository / "blobs", other):
        folder.mkdir(parents=True)
    for folder in (repository / "blobs", other):
        (folder / "abc").write_text("x")
    (snapshot / "file").symlink_to("../../blobs/abc")
    (snapshot / "sub" / "file").symlink_to("../../../blobs/abc")
    (snapshot / "other").symlink_to("../../../models--org--other/blobs/abc")
    (snapshot / "refs").symlink_to("../../refs")
    (repository / "refs").write_text("x")
    (tmp_path / "alias").symlink_to(snapshot)
    assert file_problem(snapshot, "file") is None
    assert file_problem(snapshot, "sub/file") is None
    assert file_problem(snapshot / "sub", "file") is None
    assert file_problem(tmp_path / "alias", "file") is None
    assert "leads out" in (file_problem(snapshot, "other") or "")
    assert "leads out" in (file_problem(snapshot, "refs") or "")
    # the same layout, whose blobs are a link to somewhere else
    (repository / "blobs" / "abc").unlink()
    (repository / "blobs").rmdir()
    (repository / "blobs").symlink_to(other)
    assert "leads out" in (file_problem(snapshot, "file") or "")
    # the same links, but not in a cache
    plain = tmp_path / "plain" / "snapshots" / "0f1"
    plain.mkdir(parents=True)
    (tmp_path / "plain" / "blobs").mkdir()
    (tmp_path / "plain" / "blobs" / "abc").write_text("x")
    (plain / "file").symlink_to("../../blobs/abc")
    assert "leads out" in (file_problem(plain, "file") or "")


def test_reading_has_a_limit_and_never_waits(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 100)
    assert read_limited(file, 100) == b"x" * 100
    with pytest.raises(UserError, match="has 100 bytes; at most 99 are read"):
        read_limited(file, 99)
    os.truncate(file, 1 << 40)
    with pytest.raises(UserError, match="at most"):
        read_json(tmp_path, "file")
    file.unlink()
    os.mkfifo(file)  # after it was found to be a file
    with pytest.raises(OSError, match="not a file"):
        open_regular(file)
    with pytest.raises(OSError, match="not a file"):
        open_regular(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "not JSON"), (b"\xff", "not JSON"), (b"[" * 100_000, "not JSON"), (b"1" * 5000, "not JSON"), (b"", "not JSON"),
        (b'{"a": 1, "a": 2}', "the key 'a' appears twice"), (b'{"x": {"b": 1, "b": 1}}', "appears twice"),
        (b"[NaN]", "NaN is not a JSON number"), (b"-Infinity", "not a JSON number"), (b"[" + b"1," * 5_000_000, "at most"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_json_that_is_refused(text: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        parse_json(text, Path("a.json"))
    assert str(caught.value).startswith("a.json: ")


def test_json_with_constants() -> None:
    assert parse_json(b'{"limit": [0.0, Infinity]}', Path("config.json"), constants=True) == {
        "limit": [0.0, float("inf")]
    }

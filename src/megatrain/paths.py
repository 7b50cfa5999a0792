"""Names and files in folders that somebody else may have written: model folders, checkpoints, runs.

[Note: names in a folder]
A manifest, an index and a config name other files. Each of these names is a plain relative path, or it is refused before
anything is opened: `name_problem`. The file behind a name is a regular file inside the folder: `file_problem` follows symbolic
links without opening anything. A link may point to another place in the folder. There is one exception, because the hub's cache
is built of such links: from `models--ORG--NAME/snapshots/REVISION/` a link may point to `models--ORG--NAME/blobs/`.

Files that are read whole have a limit, and their size is compared with it first: a device or a sparse file must not fill the
host's memory.
"""

from __future__ import annotations

import json
import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatrain.errors import UserError

JSON_BYTES = 64 << 20
"""Largest JSON file that is read. The index of a model with 70,000 tensors has 6 MB."""
JSON_VALUES = 4_000_000
"""Largest number of commas and brackets in it: a value takes up to 100 bytes of memory and 3 bytes of text."""
_CACHED_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")
_UNPRINTABLE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories that no file name needs: control and format characters (bidirectional marks), surrogates, unassigned."""
_PART_BYTES, _NAME_BYTES = 255, 1024
SHOWN_LETTERS = 160
"""Length of a name in a message."""
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def name_problem(name: object) -> str | None:
    """Why a name is not a plain relative path like `model.safetensors` or `state/head.safetensors`; None if it is one."""
    if not isinstance(name, str):
        return "is not text"
    if not name:
        return "is empty"
    if any(unicodedata.category(letter) in _UNPRINTABLE for letter in name):
        return "has control characters, or others that cannot be printed"
    # Full-width letters and the like may become plain ones on the way through other programs.
    for form in (name, unicodedata.normalize("NFKC", name)):
        parts = form.split("/")
        if "\\" in form or ":" in form:
            return "has a backslash or a colon"
        if form.startswith("/"):
            return "is an absolute path"
        if ".." in parts:
            return "leads out of the folder"
        if any(part in ("", ".") for part in parts):
            return "has an empty part"
        if any(part != part.strip() for part in parts):
            return "has a space at an end"
    if form.count("/") != name.count("/"):
        return "has letters that look like a slash"
    if len(name.encode()) > _NAME_BYTES or any(len(part.encode()) > _PART_BYTES for part in name.split("/")):
        return "is too long"
    return None


def refuse_names(names: Iterable[object], where: str | Path) -> None:
    """Raise unless all names in a file are plain, and stay different on file systems that ignore case.

    Args:
        names: What the file calls other files of its folder.
        where: The file.

    Raises:
        UserError: Quotes the name.
    """
    remedy = "a file may only name plain files of its own folder: get an intact copy of the folder"
    seen: dict[str, str] = {}
    folders: dict[str, str] = {}
    for name in names:
        if (problem := name_problem(name)) is not None:
            raise UserError(f"names {shown(name)}, which {problem}", str(where), remedy)
        assert isinstance(name, str)
        same = unicodedata.normalize("NFC", name).casefold()
        if same in seen:
            both = f"{shown(name)} and {shown(seen[same])}"
            raise UserError(f"names {both}, the same file on some systems", str(where), remedy)
        seen[same] = name
        while "/" in same:
            same = same.rpartition("/")[0]
            folders[same] = name
    for same in sorted(seen.keys() & folders.keys()):
        both = f"{shown(seen[same])} and {shown(folders[same])}"
        raise UserError(f"names {both}: the first as a file and as a folder", str(where), remedy)


def shown(name: object) -> str:
    """A name from a file, quoted and cut, for a message."""
    text = repr(name)
    return text if len(text) <= SHOWN_LETTERS else text[: SHOWN_LETTERS - 3] + "..."


def file_problem(folder: Path, name: str) -> str | None:
    """Why `name` is not a regular file inside `folder`, for a message; None if it is one. Opens nothing.

    See [Note: names in a folder].
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
        kind = real.stat().st_mode
    except FileNotFoundError:
        return "the symbolic link leads to nothing" if path.is_symlink() else "the file is missing"
    except RuntimeError:  # pathlib's word for links in a circle
        return "the symbolic link leads in a circle"
    except (OSError, ValueError) as error:
        return f"cannot be found: {getattr(error, 'strerror', None) or error}"
    if not _is_inside(real, folder):
        return f"is a symbolic link that leads out of its folder, to {real}"
    for is_kind, word in _KINDS:
        if is_kind(kind):
            return f"is {word}, not a file"
    return None


def regular_file(folder: Path, name: str) -> Path:
    """The path of a regular file inside a folder. UserError if `file_problem` finds one."""
    if (problem := file_problem(folder, name)) is not None:
        remedy = "copy the file itself into the folder" if "symbolic link" in problem else "get an intact copy of it"
        raise UserError(problem, str(folder / name), remedy)
    return folder / name


def open_regular(path: Path) -> int:
    """A descriptor to read a file that `regular_file` has found. Never waits, whatever has taken the file's place.

    Raises:
        OSError: The system refuses it, or it is no regular file any more.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a file")
    return fd


def read_limited(path: Path, limit_bytes: int) -> bytes:
    """The content of a file that `regular_file` has found.

    Raises:
        UserError: It is larger than the limit, or the system refuses to read it.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise UserError(f"has {size:,} bytes; at most {limit_bytes:,} are read", str(path))
            return file.read(size)
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", str(path)) from error


def read_json(folder: Path, name: str, *, constants: bool = False) -> Any:
    """The value in a JSON file of a folder.

    Args:
        folder, name: The file, see `regular_file`.
        constants: Accept `NaN` and `Infinity`, which transformers writes into configs.

    Raises:
        UserError: There is no such file in the folder, it is too large, or it is not JSON.
    """
    path = regular_file(folder, name)
    return parse_json(read_limited(path, JSON_BYTES), path, constants=constants)


def json_values(data: bytes) -> int:
    """Bound on the number of values in a JSON text."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def parse_json(data: bytes, where: Path, *, constants: bool = False, most_values: int = JSON_VALUES) -> Any:
    """The value of a JSON text. A key that appears twice in an object is an error: readers disagree on which one counts.

    Raises:
        UserError: It is not JSON, or has too many values; names the file `where`.
    """
    if (values := json_values(data)) > most_values:
        raise UserError(f"has up to {values:,} values; at most {most_values:,} are read", str(where))

    def no_constant(word: str) -> Any:
        raise ValueError(f"{word} is not a JSON number")

    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_each_key_once,
            parse_constant=None if constants else no_constant,
        )
    except (ValueError, RecursionError) as error:  # ValueError includes errors of JSON and of UTF-8
        raise UserError(f"not JSON: {error}", str(where)) from error


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {shown(twice)} appears twice in one object")
    return found


def _is_inside(real: Path, folder: Path) -> bool:
    root = folder.resolve()
    if real.is_relative_to(root):
        return True
    for parent in (root, *root.parents):
        # The blobs' own folder is not resolved: if it is a link, what it points to is not in the cache.
        if parent.parent.name == "snapshots" and _CACHED_REPOSITORY.fullmatch(parent.parent.parent.name):
            return real.is_relative_to(parent.parent.parent / "blobs")
    return False


def user_cache() -> Path:
    """The program's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain"

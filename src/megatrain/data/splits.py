"""The files of a local folder, and which of them are held out by their names.

[Note: splits of a folder]
A downloaded data set often comes as a folder with files or folders called train, validation and test. Training the test files
would make every evaluation on them worthless, so they are left out, and named, unless `split` asks for them. Words in a file's
path below the folder decide, as on the hub; a file without such a word is trained.

[Note: saved data sets]
`save_to_disk` of the `datasets` library writes a folder with Arrow files and `state.json`, which lists them; other Arrow files
there are caches. A saved dictionary has a folder for each split, and `dataset_dict.json`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatrain.data.files import READABLE, readable
from megatrain.errors import UserError

Splits = dict[str, list[Path]]

NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that describe a data set."""
SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_MOST_NAMED = 8


@dataclass(frozen=True)
class Found:
    """The files of a source, in a fixed order, and remarks about files that are not read."""

    files: list[Path]
    remarks: tuple[str, ...] = ()


def split_of(path: Path) -> str:
    """The split that the words of a relative path name; empty if they name none."""
    words = set(re.split(r"[^a-z]+", str(path).lower()))
    return next((name for name, aliases in SPLIT_WORDS.items() if words & aliases), "")


def folder_files(folder: Path, split: str | None, where: str) -> Found:
    """The files of a split of a folder: see [Note: splits of a folder]. None: all that are not held out; `all`: all.

    Raises:
        UserError: There are none.
    """
    if (folder / "dataset_dict.json").is_file():
        files = _saved_split(folder, split, where)
    else:
        files = _data_files(folder, where)
        by_split: Splits = {}
        for file in files:
            by_split.setdefault(split_of(file.relative_to(folder)), []).append(file)
        files = _chosen(files, by_split, split, folder, where)
    every = _visible(folder)
    others = [
        f
        for f in every
        if f not in set(files) and f.name not in NO_DATA and not f.name.lower().startswith(("readme", "license"))
    ]
    held_out = [f for f in others if readable(f) and split_of(f.relative_to(folder)) not in ("", split or "train")]
    unreadable = [f for f in others if not readable(f)]
    remarks = []
    if held_out:
        named = _listed(str(file.relative_to(folder)) for file in held_out)
        remarks.append(
            f"warning: not read, as their names say that they are held out: {named} (split: all reads every file)"
        )
    if unreadable:
        named = _listed({file.suffix or file.name for file in unreadable})
        remarks.append(f"{len(unreadable)} files of other types are not read: {named}")
    return Found(files, tuple(remarks))


def glob_remarks(files: list[Path]) -> tuple[str, ...]:
    """A warning if a glob, which is taken literally, mixes training files and held-out ones."""
    splits = {file: split_of(Path(file.name)) for file in files}
    held_out = [file for file, split in splits.items() if split not in ("", "train")]
    if not held_out or len(held_out) == len(files):
        return ()
    named = _listed(file.name for file in held_out)
    return (f"warning: the glob also matches files that are held out by their names: {named}",)


def _visible(folder: Path) -> list[Path]:
    return [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    ]


def _data_files(folder: Path, where: str) -> list[Path]:
    """All data files below a folder; of saved data sets those that they list."""
    below = _visible(folder)
    saved = {file.parent: _saved_files(file) for file in below if file.name == "state.json"}
    files = []
    for file in below:
        listed = next((saved[parent] for parent in file.parents if saved.get(parent)), None)
        if file in listed if listed is not None else readable(file) and file.name not in NO_DATA:
            files.append(file)
    if files:
        return files
    suffixes = sorted({file.suffix or file.name for file in below})
    found = f"it holds only {', '.join(suffixes[:_MOST_NAMED])}" if suffixes else "it is empty"
    remedy = f"megatrain reads {READABLE}; a glob such as {str(folder).rstrip('/')}/**/*.py reads any file as text"
    raise UserError(f"no data files in the folder {folder}: {found}", where, remedy)


def _saved_files(state: Path) -> list[Path]:
    """The files that `state.json` of a saved data set lists; empty if it is another file of that name."""
    import orjson

    try:
        value = orjson.loads(state.read_bytes())
        names = [str(entry["filename"]) for entry in value["_data_files"]]
    except (OSError, orjson.JSONDecodeError, LookupError, TypeError):
        return []
    if any(value.get(key) for key in ("_indices_data_files", "_indices_files")):
        what = "is a saved data set with an index of chosen rows (select, shuffle, filter), which is not read"
        raise UserError(what, str(state.parent), "save it again after dataset.flatten_indices()")
    missing = [name for name in names if not (state.parent / name).is_file()]
    if missing:
        raise UserError(f"is incomplete: {', '.join(missing)} is missing", str(state.parent), "save the data set again")
    return [state.parent / name for name in names]


def _saved_split(folder: Path, split: str | None, where: str) -> list[Path]:
    """The files of one split of a saved dictionary of data sets; None: `train`, or the only one."""
    names = sorted(state.parent.name for state in folder.glob("*/state.json"))
    if split == "all":
        return [file for name in names for file in _data_files(folder / name, where)]
    wanted = split or (names[0] if len(names) == 1 else "train")
    if wanted not in names:
        raise UserError(
            f"the data set {folder} has no split {wanted}", where, f"set split to one of {', '.join(names)}, or all"
        )
    return _data_files(folder / wanted, where)


def _chosen(files: list[Path], by_split: Splits, split: str | None, folder: Path, where: str) -> list[Path]:
    names = [name or "train" for name in by_split]
    if split is None:
        wanted = {"", "train"}
    elif split == "all":
        return files
    else:
        wanted = {next((name for name, aliases in SPLIT_WORDS.items() if split in aliases), split)}
        wanted |= {""} if "train" in wanted and "train" not in by_split else set()
    if chosen := [file for name, own in by_split.items() if name in wanted for file in own]:
        return sorted(chosen)
    listed = ", ".join(sorted(set(names)))
    what = f"the folder {folder} has no files of the split {split or 'train'}: by their names they are {listed}"
    raise UserError(what, where, f"set split to one of {listed}, or all")


def _listed(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:_MOST_NAMED]) + (
        f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    )

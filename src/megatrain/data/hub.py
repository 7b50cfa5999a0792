"""Data sets of the Hugging Face hub, from the local cache. Nothing is downloaded, and no code of a data set runs.

Two caches hold them: the hub's, with the files as their authors wrote them (`hf download ORG/NAME --repo-type dataset`), and that
of the datasets library, with Arrow files (`datasets.load_dataset`). The first that holds the split is read.

Which files make a split is said by the front matter of the data set's README.md, else by their names, as on the hub: a path with
the word `train` in it belongs to the split `train`, and where no path has such a word everything is `train`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.errors import UserError

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def is_hub_id(path: str) -> bool:
    """Whether a path that does not exist may be meant as `org/name`: one slash, and no local folder of that name."""
    return _ID.fullmatch(path) is not None and not Path(path).parent.is_dir()


def cached_files(hub_id: str, subset: str | None, split: str | None, readable: Any, where: str) -> list[Path]:
    """The files of a split of a data set in the local caches, in a fixed order.

    Args:
        hub_id: `org/name`.
        subset: The hub's "subset" or "config"; None: the default one, or the only one.
        split: None means `train`.
        readable: Tells whether a file is of a kind that can be read.
        where: The config's name of the source, for errors.

    Raises:
        UserError: It is in neither cache, or has no such subset or split.
    """
    wanted = split or "train"
    there: list[str] = []
    for splits in _found(hub_id, subset, readable, where):
        if wanted in splits:
            return splits[wanted]
        there += splits
    if there:
        raise UserError(
            f"the data set {hub_id} has no split {wanted}" + (f" in the subset {subset}" if subset else ""),
            where=where,
            remedy=f"set split to one of {', '.join(dict.fromkeys(there))}",
        )
    raise UserError(
        f"{hub_id} is no file or folder here, and no data set in the local cache; megatrain downloads nothing",
        where=where,
        remedy=f"check the path, or fetch the data set first: hf download {hub_id} --repo-type dataset",
    )


def _found(hub_id: str, subset: str | None, readable: Any, where: str) -> Iterator[dict[str, list[Path]]]:
    """For each cache that holds the data set: split -> files."""
    if (snapshot := _snapshot(hub_id)) is not None:
        splits = _declared(snapshot, subset, where)
        if splits is None:
            splits = _by_name(snapshot, subset, readable)
        if splits:
            yield splits
    if (prepared := _prepared(hub_id, subset, where)) is not None:
        yield prepared


# ---- the hub's cache


def _snapshot(hub_id: str) -> Path | None:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(hub_id, repo_type="dataset", cache_dir=constants.HF_HUB_CACHE, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return Path(str(found))


def _declared(snapshot: Path, subset: str | None, where: str) -> dict[str, list[Path]] | None:
    """The splits that the README's front matter names; None if it names none."""
    configs = _front_matter(snapshot / "README.md").get("configs")
    if not isinstance(configs, list):
        return None
    named = {str(c.get("config_name", "default")): c for c in configs if isinstance(c, dict) and c.get("data_files")}
    if not named:
        return None
    default = next((name for name, c in named.items() if c.get("default")), None)
    config = named[_choose(list(named), subset, default, where)]
    root = snapshot / str(config.get("data_dir", "."))
    splits: dict[str, list[Path]] = {}
    for split, pattern in _patterns(config["data_files"]):
        splits.setdefault(split, []).extend(sorted(file for file in root.glob(pattern) if file.is_file()))
    return {split: files for split, files in splits.items() if files}


def _patterns(data_files: object) -> Iterator[tuple[str, str]]:
    """(split, glob) of the forms that `data_files` takes."""
    for item in data_files if isinstance(data_files, list) else [data_files]:
        if isinstance(item, Mapping):
            paths = item.get("path", [])
            for path in paths if isinstance(paths, list) else [paths]:
                yield str(item.get("split", "train")), str(path)
        else:
            yield "train", str(item)


def _front_matter(readme: Path) -> Mapping[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not readme.is_file():
        return {}
    match = re.match(r"---\r?\n(.*?)\r?\n---", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    if match is None:
        return {}
    try:
        found = YAML(typ="safe", pure=True).load(match[1])
    except YAMLError:
        return {}  # files are then told apart by their names, as the hub itself does
    return found if isinstance(found, Mapping) else {}


def _by_name(snapshot: Path, subset: str | None, readable: Any) -> dict[str, list[Path]]:
    files = [
        file
        for file in sorted(snapshot.rglob("*"))
        if file.is_file()
        and readable(file)
        and file.name not in _NO_DATA
        and not file.name.lower().startswith(("readme", "license"))
        and not any(part.startswith(".") for part in file.relative_to(snapshot).parts)
    ]
    if subset is not None:
        files = [file for file in files if subset in file.relative_to(snapshot).parts[:-1]]
    splits: dict[str, list[Path]] = {}
    for file in files:
        words = set(re.split(r"[^a-z]+", str(file.relative_to(snapshot)).lower()))
        split = next((name for name, aliases in _SPLIT_WORDS.items() if words & set(aliases)), None)
        splits.setdefault(split or "", []).append(file)
    if set(splits) == {""}:
        return {"train": splits[""]}
    splits.pop("", None)
    return splits


# ---- the cache of the datasets library


def _prepared(hub_id: str, subset: str | None, where: str) -> dict[str, list[Path]] | None:
    """<cache>/org___name/<subset>/<version>/<hash>/name-train[-00000-of-00002].arrow"""
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    organisation, name = hub_id.split("/")
    name = _snake(name)
    root = cache / f"{organisation}___{name}"
    # a build that was broken off lies in a folder that ends in .incomplete
    infos = [info for info in root.glob("*/*/*/dataset_info.json") if not info.parent.name.endswith(".incomplete")]
    if not infos:
        return None
    subsets = sorted({info.parts[-4] for info in infos})
    chosen = _choose(subsets, subset, "default" if "default" in subsets else None, where)
    newest = max((info for info in infos if info.parts[-4] == chosen), key=lambda info: info.stat().st_mtime_ns).parent
    splits: dict[str, list[Path]] = {}
    for file in sorted(newest.glob(f"{name}-*.arrow")):
        match = re.fullmatch(re.escape(name) + r"-(.+?)(-\d{5}-of-\d{5})?\.arrow", file.name)
        if match is not None:
            splits.setdefault(match[1], []).append(file)
    return splits or None


def _snake(name: str) -> str:
    """The library's name of a data set: OpenOrca -> open_orca."""
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower()


def _choose(subsets: Sequence[str], wanted: str | None, default: str | None, where: str) -> str:
    if wanted is None and (default is not None or len(subsets) == 1):
        return default if default is not None else subsets[0]
    if wanted is not None and wanted in subsets:
        return wanted
    what = "the data set has several subsets" if wanted is None else f"the data set has no subset {wanted}"
    raise UserError(what, where, f"set subset to one of {', '.join(subsets)}")

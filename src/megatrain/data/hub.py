"""Datasets of the Hugging Face hub, in the local cache.

[Note: hub datasets]
Datasets of the Hugging Face hub are read from the local cache. Nothing is downloaded, and no code of a dataset runs.
Two caches are searched, in this order: the hub's, with the files as published (`hf download ORG/NAME --repo-type dataset`),
and the cache of the `datasets` library, with Arrow files (`datasets.load_dataset`). The first that has the split is used.

The README's front matter lists the files of each split. Without it, file names decide, as on the hub: a path containing
the word `train` belongs to the split `train`; if no path contains a split's word, all files are `train`. The `datasets`
library itself is not used: it is no dependency, it takes seconds to import, and offline it guesses a subset instead of asking.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatrain.data.files import readable
from megatrain.data.splits import NO_DATA, Splits, split_of
from megatrain.errors import UserError

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_id(path: str) -> bool:
    """Whether a path that does not exist may be a hub id, `org/name`: one slash, and no local folder `org`."""
    return _ID.fullmatch(path) is not None and not Path(path).parent.is_dir()


def cached_files(hub_id: str, subset: str | None, split: str | None, where: str) -> list[Path]:
    """The files of one split (None: `train`) of a cached dataset, in a fixed order. See [Note: hub datasets].

    `subset`: the hub's "subset" or "config"; None: the default, or the only one.
    """
    wanted = split or "train"
    seen: list[str] = []
    for splits in _cached_splits(hub_id, subset, where):
        if wanted in splits:
            return splits[wanted]
        seen += splits
    if seen:
        what = f"the dataset {hub_id} has no split {wanted}" + (f" in the subset {subset}" if subset else "")
        raise UserError(what, where, f"set split to one of {', '.join(dict.fromkeys(seen))}")
    what = f"{hub_id} is neither a local path nor a dataset in the local cache; megatrain downloads nothing"
    remedy = f"check the path, or fetch the dataset first: hf download {hub_id} --repo-type dataset"
    raise UserError(what, where, remedy)


def _cached_splits(hub_id: str, subset: str | None, where: str) -> Iterator[Splits]:
    """The splits of the dataset in each cache that has it."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # The path is read at each call, as tests and users change it after the import.
        folder = snapshot_download(hub_id, repo_type="dataset", cache_dir=constants.HF_HUB_CACHE, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        pass
    else:
        snapshot = Path(str(folder))
        splits = _declared(snapshot, subset, where)
        if splits := _by_name(snapshot, subset) if splits is None else splits:
            yield splits
    if splits := _prepared(hub_id, subset, where):
        yield splits


def _declared(snapshot: Path, subset: str | None, where: str) -> Splits | None:
    """The splits listed in the README's front matter, or None."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        configs = (metadata_load(snapshot / "README.md") or {}).get("configs")
    except (OSError, ValueError, YAMLError):
        return None  # no README, or one without valid front matter: file names decide, as on the hub
    if not isinstance(configs, list):
        return None
    named = {str(c.get("config_name", "default")): c for c in configs if isinstance(c, dict) and c.get("data_files")}
    if not named:
        return None
    default = next((name for name, c in named.items() if c.get("default")), None)
    config = named[_choose(list(named), subset, default, where)]
    root = snapshot / str(config.get("data_dir", "."))
    splits: Splits = {}
    for split, pattern in _patterns(config["data_files"]):
        splits.setdefault(split, []).extend(sorted(file for file in root.glob(pattern) if file.is_file()))
    return {split: files for split, files in splits.items() if files}


def _patterns(data_files: object) -> Iterator[tuple[str, str]]:
    """(split, glob) pairs from any form that `data_files` may have."""
    for item in data_files if isinstance(data_files, list) else [data_files]:
        split, paths = (
            (item.get("split", "train"), item.get("path", [])) if isinstance(item, Mapping) else ("train", item)
        )
        for path in paths if isinstance(paths, list) else [paths]:
            yield str(split), str(path)


def _by_name(snapshot: Path, subset: str | None) -> Splits:
    """The splits according to the words in the files' paths."""
    splits: Splits = {}
    for file in sorted(snapshot.rglob("*")):
        path = file.relative_to(snapshot)
        is_other = file.name in NO_DATA or file.name.lower().startswith(("readme", "license"))
        if is_other or any(part.startswith(".") for part in path.parts) or not (file.is_file() and readable(file)):
            continue
        if subset is not None and subset not in path.parts[:-1]:
            continue
        splits.setdefault(split_of(path), []).append(file)
    without = splits.pop("", [])
    return splits or ({"train": without} if without else {})


def _prepared(hub_id: str, subset: str | None, where: str) -> Splits:
    """The splits in the cache of the `datasets` library:
    CACHE/org___name/SUBSET/VERSION/HASH/name-train[-00000-of-00002].arrow"""
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    organisation, name = hub_id.split("/")
    # The library stores OpenOrca as open_orca.
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    name = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower()
    infos = (cache / f"{organisation}___{name}").glob("*/*/*/dataset_info.json")
    folders = [info.parent for info in infos if not info.parent.name.endswith(".incomplete")]  # of an aborted build
    if not folders:
        return {}
    subsets = sorted({folder.parts[-3] for folder in folders})
    chosen = _choose(subsets, subset, "default" if "default" in subsets else None, where)
    newest = max(
        (folder for folder in folders if folder.parts[-3] == chosen),
        key=lambda folder: (folder / "dataset_info.json").stat().st_mtime_ns,
    )
    splits: Splits = {}
    for file in sorted(newest.glob(f"{name}-*.arrow")):
        if match := re.fullmatch(re.escape(name) + r"-(.+?)(-\d{5}-of-\d{5})?\.arrow", file.name):
            splits.setdefault(match[1], []).append(file)
    return splits


def _choose(subsets: Sequence[str], wanted: str | None, default: str | None, where: str) -> str:
    if wanted is None and (default is not None or len(subsets) == 1):
        return default if default is not None else subsets[0]
    if wanted is not None and wanted in subsets:
        return wanted
    what = "the dataset has several subsets" if wanted is None else f"the dataset has no subset {wanted}"
    raise UserError(what, where, f"set subset to one of {', '.join(subsets)}")

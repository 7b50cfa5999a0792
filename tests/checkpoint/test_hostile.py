"""Checkpoints from somebody else: whatever their manifests say, nothing outside of the folder is opened or written, memory is
bounded, and every error is one that a user can read."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hosted import BY_NAME, Hosted, host_folder, load, save, save_family, trained
from megatrain.checkpoint import format as checkpoint_format
from megatrain.checkpoint.export import export, verify
from megatrain.checkpoint.format import canonical, read_manifest
from megatrain.checkpoint.reader import OpenCheckpoint, check_model_folder, is_complete, latest_complete, saved_extra
from megatrain.commands.main import main
from megatrain.errors import UserError
from megatrain.models import weights
from megatrain.models.weights import find_weight_files
from megatrain.run.folder import RunFolder
from opens import outside, watching

FUZZED = 2000
SECRET = b"private\n"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hosted, Path]:
    """(a state, a run with checkpoints of it after steps 1 and 2), not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    small = replace(BY_NAME["llama"], overrides={**BY_NAME["llama"].overrides, "num_hidden_layers": 1})
    save_family(small, folder / "source")
    (folder / "source" / "tokenizer.json").write_text('{"a": 1}')
    hosted = trained(folder / "source")
    for step in (1, 2):
        target = folder / "run" / "checkpoints" / f"step_{step:06d}"
        save(hosted, target, folder / "source", step=step, extra={"step": step})
    (folder / "run" / "config.yaml").write_text("model: {}\n")
    return hosted, folder / "run"


@pytest.fixture
def run(made: tuple[Hosted, Path], tmp_path: Path) -> Path:
    """A copy of the run, with a private file beside it."""
    shutil.copytree(made[1], tmp_path / "run")
    (tmp_path / "secret").write_bytes(SECRET)
    return tmp_path / "run"


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step_000002"


def sign(manifest: Any) -> bytes:
    """The text of a manifest with a right checksum."""
    manifest = {key: value for key, value in manifest.items() if key != "crc32"}
    return json.dumps(manifest | {"crc32": zlib.crc32(canonical(manifest))}).encode()


def rewrite(checkpoint: Path, change: Change) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    change(manifest)
    (checkpoint / "manifest.json").write_bytes(sign(manifest))


def record(data: bytes) -> dict[str, int]:
    return {"size": len(data), "crc32": zlib.crc32(data)}


def put(checkpoint: Path, name: str, data: bytes, **more: Any) -> None:
    """Replace a file, and its record in the manifest."""
    (checkpoint / name).write_bytes(data)
    rewrite(checkpoint, lambda manifest: manifest["files"].update({name: record(data) | more}))


def refused_by_all(checkpoint: Path, hosted: Hosted, out: Path) -> list[str]:
    """The errors of every reader. None of them opens a file outside of the run, or writes one."""
    errors = []
    readers: list[Callable[[], object]] = [
        lambda: read_manifest(checkpoint),
        lambda: verify(checkpoint),
        lambda: load(checkpoint, hosted),
        lambda: OpenCheckpoint(checkpoint, hosted.structure),
        lambda: export(checkpoint, out),
        lambda: saved_extra(checkpoint),
    ]
    before = sorted(out.parent.iterdir())
    for reader in readers:
        with watching() as opened, pytest.raises(UserError) as caught:
            reader()
        assert outside(opened, checkpoint.parent.parent) == []
        errors.append(str(caught.value))
    assert sorted(out.parent.iterdir()) == before, "nothing was written"
    return errors


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    "name", ["../secret", "sub/../../secret", "{parent}/secret", "/dev/zero", "tokenizer.json\0", "a\\b"]
)
def test_a_manifest_that_names_a_file_outside_is_refused_by_every_reader(
    name: str, made: tuple[Hosted, Path], run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a checkpoint whose export wrote `../dropped.sh` beside its target."""
    name = name.replace("{parent}", str(tmp_path))
    (newest(run) / "sub").mkdir()
    for parent in (newest(run).parent, tmp_path):
        (parent / "secret").write_bytes(SECRET)
    rewrite(newest(run), lambda manifest: manifest["files"].update({name: record(SECRET)}))
    for error in refused_by_all(newest(run), made[0], tmp_path / "out"):
        assert f"{newest(run)}/manifest.json: names {name!r}, which" in error
        assert "only name plain files of its own folder" in error
    with caplog.at_level(logging.WARNING, "megatrain"):
        assert RunFolder(run).resume_point("auto") == run / "checkpoints" / "step_000001"
    assert f"ignoring {newest(run)}: names" in caplog.text
    for words in (["verify", "IT"], ["export", "IT", str(tmp_path / "out")], ["generate", "IT", "--prompt=x"]):
        assert main([str(newest(run)) if word == "IT" else word for word in words]) == 2
    with pytest.raises(UserError, match=r"is not a complete checkpoint: .*manifest\.json: names"):
        RunFolder(tmp_path / "another").resume_point(str(newest(run)))
    with pytest.raises(UserError, match=r"manifest\.json: names"):
        check_model_folder(newest(run))


@pytest.mark.parametrize("target", ["../../../secret", "/dev/zero", "/dev/null", "nowhere"])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "state.json", "config.json", "manifest.json", "state/head.safetensors"]
)
def test_a_file_that_is_a_link_out_of_the_folder_is_refused(
    name: str, target: str, made: tuple[Hosted, Path], run: Path, tmp_path: Path
) -> None:
    file = newest(run) / name
    file.unlink()
    file.symlink_to(f"../{target}" if "/" in name and target.startswith("..") else target)
    for error in refused_by_all(newest(run), made[0], tmp_path / "out"):
        assert f"{file}: " in error
        assert "symbolic link" in error
    assert latest_complete(run / "checkpoints") == run / "checkpoints" / "step_000001"


def test_pipes_folders_and_devices_are_refused_without_waiting(
    made: tuple[Hosted, Path], run: Path, tmp_path: Path
) -> None:
    for make, word in ((os.mkfifo, "a pipe"), (os.mkdir, "a folder")):
        for name in ("tokenizer.json", "state/head.safetensors", "manifest.json"):
            file, kept = newest(run) / name, tmp_path / "kept"
            file.rename(kept)
            make(file)
            assert all(word in error for error in refused_by_all(newest(run), made[0], tmp_path / "out"))
            file.rmdir() if word == "a folder" else file.unlink()
            kept.rename(file)
    assert is_complete(newest(run))


def test_links_inside_the_folder_are_followed(made: tuple[Hosted, Path], run: Path) -> None:
    (newest(run) / "tokenizer.json").rename(newest(run) / "real.json")
    (newest(run) / "tokenizer.json").symlink_to("real.json")
    verify(newest(run))
    load(newest(run), host_folder(made[1].parent / "source"))


def test_a_checkpoint_in_the_hubs_cache_is_read(made: tuple[Hosted, Path], tmp_path: Path) -> None:
    """`hf download` of a published checkpoint: every file is a link to a blob."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0f1"
    (repository / "blobs").mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in newest(made[1]).rglob("*") if path.is_file())):
        shutil.copy(file, repository / "blobs" / f"{number}")
        link = snapshot / file.relative_to(newest(made[1]))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(repository / "blobs" / f"{number}", link.parent))
    verify(snapshot)
    load(snapshot, host_folder(made[1].parent / "source"))
    assert export(snapshot, tmp_path / "out").is_dir()
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


# ------------------------------------------------------------------ schema and sizes


JUNK: list[Any] = [None, True, -1, 1 << 64, 1.5, "", "1", "\ud800", [], [1], {}, {"a": 1}, [[[]]]]


@pytest.mark.parametrize(
    "key", ["format", "version", "step", "files", "files.*", "files.*.size", "files.*.crc32", "files.*.tensors"]
)
def test_a_manifest_of_another_shape_is_an_error_and_not_a_traceback(
    key: str, made: tuple[Hosted, Path], run: Path, tmp_path: Path
) -> None:
    kept = (newest(run) / "manifest.json").read_bytes()
    name = "state/head.safetensors"
    for junk in [*JUNK, "drop"]:

        def change(manifest: dict[str, Any], junk: Any = junk) -> None:
            *path, last = key.replace("*", name.replace(".", "\n")).split(".")
            part: Any = manifest
            for step in path:
                part = part[step.replace("\n", ".")]
            last = last.replace("\n", ".")
            if junk == "drop":
                del part[last]
            else:
                part[last] = junk

        rewrite(newest(run), change)
        if key == "files" and junk == {}:
            assert read_manifest(newest(run)).files == {}  # a folder of nothing; it holds no state
        elif (key, junk) == ("files.*", "drop") or (key == "files.*.tensors" and junk in ({}, {"a": 1}, "drop")):
            read_manifest(newest(run))  # of that shape; what it says is wrong
        else:
            with pytest.raises(UserError) as caught:
                read_manifest(newest(run))
            assert str(newest(run)) in str(caught.value), junk
        with pytest.raises(UserError):
            load(newest(run), made[0])
        assert RunFolder(run).resume_point("auto") in (newest(run), newest(run).with_name("step_000001"))
        (newest(run) / "manifest.json").write_bytes(kept)
    load(newest(run), host_folder(made[1].parent / "source"))


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"[" * 50_000 + b"]" * 50_000, b'{"a":' * 900 + b"1" + b"}" * 900,
     b"1" * 10_000, b'{"format": "megatrain-checkpoint"}', b'{"format": "megatrain-checkpoint", "crc32": NaN}'],
    ids=lambda text: str(text[:24]),
)  # fmt: skip
def test_a_manifest_that_is_something_else(text: bytes, made: tuple[Hosted, Path], run: Path, tmp_path: Path) -> None:
    (newest(run) / "manifest.json").write_bytes(text)
    refused_by_all(newest(run), made[0], tmp_path / "out")
    assert latest_complete(run / "checkpoints") == run / "checkpoints" / "step_000001"


@pytest.mark.parametrize("name", ["manifest.json", ".megatrain-partial"])
def test_a_manifest_that_lists_a_file_of_the_format_itself(name: str, run: Path) -> None:
    put(newest(run), "tokenizer.json", b"{}")
    rewrite(newest(run), lambda manifest: manifest["files"].update({name: record(b"{}")}))
    with pytest.raises(UserError, match="none of the files that it describes"):
        read_manifest(newest(run))


STATES: list[Change] = [
    lambda state: state.update(units=[]),
    lambda state: state["units"].update(head={"weights_crc32": {"x": -1}}),
    lambda state: state["units"].update(head=None),
    lambda state: state.update(state=None),
    lambda state: state["state"].update(step="1"),
    lambda state: state["state"].pop("updates"),
    lambda state: state["state"].update(seed=1 << 70),
    lambda state: state["state"].update(loss_scale={"scale": "x"}),
    lambda state: state["state"].update(ladder={"resident": "x"}),
    lambda state: state["state"].update(extra={"$tensor": {"dtype": "F99", "shape": [1], "data": ""}}),
    lambda state: state["state"].update(
        extra={"x": {"$tensor": {"dtype": "F32", "shape": [-3, 1 << 62], "data": "AAAA"}}}
    ),
    lambda state: state["state"].update(extra={"x": {"$bytes": "no base64!"}}),
    lambda state: state["state"].update(extra={"x": {"$float": "eleven"}}),
    lambda state: state.update(source_dtype=3),
    lambda state: state.update(optimizer=None),
]


@pytest.mark.parametrize("number", range(len(STATES)))
def test_a_state_of_another_shape_is_an_error_and_not_a_traceback(
    number: int, made: tuple[Hosted, Path], run: Path
) -> None:
    state = json.loads((newest(run) / "state.json").read_bytes())
    STATES[number](state)
    put(newest(run), "state.json", json.dumps(state).encode())
    assert is_complete(newest(run)), "the right checksum"
    with pytest.raises(UserError) as caught:
        load(newest(run), made[0])
    assert str(newest(run)) in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"step": -1}, "step"), ({"step": 10**12}, "step"), ({"step": 2, "data": []}, "data"),
        ({"step": 2, "held_out": "zz"}, "held_out"), ({"step": 2, "held_out": "00"}, "held_out"),
        ({"step": 2, "data_offset": None}, "data_offset"), ({"step": 2, "guard": {"recent_losses": [[]]}}, "guard"),
        ([], "not written by `megatrain train`"), ({}, "not written by `megatrain train`"), ("x", "not written"),
    ],
)  # fmt: skip
def test_what_a_run_remembers_has_a_schema_too(extra: Any, says: str, run: Path) -> None:
    state = json.loads((newest(run) / "state.json").read_bytes())
    state["state"]["extra"] = extra
    put(newest(run), "state.json", json.dumps(state).encode())
    with pytest.raises(UserError, match=says):
        saved_extra(newest(run))


def with_header(file: Path, change: Change | bytes, length: int | None = None) -> tuple[bytes, dict[str, Any]]:
    """(a safetensors file with another header, its record with right checksums)."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    if isinstance(change, bytes):
        text = change
    else:
        change(header)
        text = json.dumps(header).encode()
    start = (len(text) if length is None else length).to_bytes(8, "little") + text
    crcs = {name: 0 for name in header if name != "__metadata__"} if isinstance(header, dict) else {}
    for name, entry in header.items():
        if name != "__metadata__" and isinstance(entry, dict) and isinstance(entry.get("data_offsets"), list):
            begin, stop = (int(at) if isinstance(at, int) else 0 for at in (*entry["data_offsets"], 0, 0)[:2])
            crcs[name] = zlib.crc32(data[end + begin : end + stop])
    return start + data[end:], {"size": len(start) + len(data) - end, "crc32": zlib.crc32(start), "tensors": crcs}


NORM = "m/model.layers.0.input_layernorm.weight"
DOWN = "m/model.layers.0.mlp.down_proj.weight"
LAST = "v/model.layers.0.input_layernorm.weight"
HEADERS: dict[str, tuple[Change | bytes, str]] = {
    "overlap": (lambda h: h[LAST].update(data_offsets=[0, 256]), "begins at byte 0"),
    "beyond": (lambda h: h[NORM].update(data_offsets=[1 << 40, (1 << 40) + 256]), "begins at byte"),
    "backwards": (lambda h: h[NORM].update(data_offsets=[256, 0]), "begins at byte|its shape and dtype need"),
    "negative": (lambda h: h[NORM].update(data_offsets=[-256, 0]), "data_offsets"),
    "three offsets": (lambda h: h[NORM].update(data_offsets=[0, 1, 2]), "data_offsets"),
    "text offsets": (lambda h: h[NORM].update(data_offsets=["0", "256"]), "data_offsets"),
    "huge shape": (lambda h: h[NORM].update(shape=[1 << 40, 1 << 40]), "its shape and dtype need"),
    "wrong shape": (lambda h: h[DOWN].update(shape=[96, 64]), "another model|has shape"),
    "negative shape": (lambda h: h[NORM].update(shape=[-64]), "shape"),
    "many dimensions": (lambda h: h[NORM].update(shape=[64] + [1] * 100_000), "dimensions"),
    "unknown dtype": (lambda h: h[NORM].update(dtype="F99"), "unknown dtype"),
    "other dtype": (lambda h: h[NORM].update(dtype="I32"), "holds .* as torch.int32"),
    "no dtype": (lambda h: h[NORM].pop("dtype"), "dtype"),
    "no entry": (lambda h: h.update({NORM: None}), NORM),
    "left out": (lambda h: h.pop(NORM), "begins at byte|need"),
    "list": (b"[]", "not as the format says"),
    "nested": (b"[" * 50_000 + b"]" * 50_000, "not JSON"),
    "no JSON": (b"{", "not JSON"),
    "twice": (b'{"a": {}, "a": {}}', "appears twice"),
}


@pytest.mark.parametrize("kind", HEADERS)
def test_headers_of_safetensors_files_are_checked(kind: str, made: tuple[Hosted, Path], run: Path) -> None:
    name = "state/layer.0.safetensors"
    change, says = HEADERS[kind]
    data, crcs = with_header(newest(run) / name, change)
    put(newest(run), name, data, **crcs)
    with pytest.raises(UserError, match=says) as caught:
        load(newest(run), made[0])
    assert str(newest(run)) in str(caught.value)


@pytest.mark.parametrize("length", [1 << 63, 200_000_000, 1 << 20])
def test_a_header_longer_than_its_file_is_refused(length: int, made: tuple[Hosted, Path], run: Path) -> None:
    name = "state/layer.0.safetensors"
    data, crcs = with_header(newest(run) / name, lambda header: None, length)
    put(newest(run), name, data, **crcs)
    for read in (lambda: load(newest(run), made[0]), lambda: verify(newest(run))):
        with pytest.raises(UserError, match=f"a header of {length:,} bytes"):
            read()


def test_sizes_are_compared_before_anything_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest may claim any size, and a sparse file have it."""
    for name in ("tokenizer.json", "state.json", "state/head.safetensors"):
        os.truncate(newest(run) / name, 1 << 40)
    monkeypatch.setattr(checkpoint_format, "open_regular", lambda path: pytest.fail(f"{path} was opened"))
    with pytest.raises(UserError, match=r"3 of .* files damaged") as caught:
        verify_only(newest(run), ["tokenizer.json", "state.json", "state/head.safetensors"])
    assert str(caught.value).count("has 1099511627776 bytes") == 3


def verify_only(checkpoint: Path, names: list[str]) -> None:
    rewrite(checkpoint, lambda manifest: manifest.update(files={name: manifest["files"][name] for name in names}))
    verify(checkpoint)


def test_a_state_that_is_too_large_is_not_read(run: Path) -> None:
    os.truncate(newest(run) / "state.json", 1 << 40)
    rewrite(newest(run), lambda manifest: manifest["files"].update({"state.json": {"size": 1 << 40, "crc32": 0}}))
    with pytest.raises(UserError, match="at most 268,435,456 are read"):
        saved_extra(newest(run))


def test_a_unit_larger_than_the_models_is_refused_before_memory_is_allocated(
    made: tuple[Hosted, Path], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sorted(newest(run).glob("model-00001*"))[0]
    text = json.dumps(
        {"model.embed_tokens.weight": {"dtype": "F32", "shape": [1 << 36], "data_offsets": [0, 1 << 38]}}
    ).encode()
    start = len(text).to_bytes(8, "little") + text
    put(newest(run), file.name, start)
    os.truncate(file, len(start) + (1 << 38))
    change = {"size": len(start) + (1 << 38), "crc32": zlib.crc32(start), "tensors": {"model.embed_tokens.weight": 0}}
    rewrite(newest(run), lambda manifest: manifest["files"].update({file.name: change}))
    real = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *size, **words: real(*size, **words) if size != ((1 << 36,),) else pytest.fail("allocated"),
    )
    with pytest.raises(UserError, match="embedding has 68,719,476,736 values, the model's"):
        load(newest(run), made[0])


# ------------------------------------------------------------------ markers, and what is removed


@pytest.mark.parametrize(
    "marker",
    [b"", b"[]", b"{}", b"null", b'{"host": "HOST", "pid": -1, "started": 1}', b'{"host": "HOST", "pid": "1", "started": 1}',
     b'{"host": "HOST", "pid": 99999999999999999999, "started": 1}', b'{"host": "HOST", "pid": 1, "started": []}', b"x" * 10_000],
)  # fmt: skip
def test_a_marker_that_nobody_wrote_is_left_alone(marker: bytes, run: Path) -> None:
    left = run / "checkpoints" / "step_000003.tmp-77"
    left.mkdir()
    (left / ".megatrain-partial").write_bytes(marker.replace(b"HOST", os.uname().nodename.encode()))
    RunFolder(run).tidy()
    assert left.is_dir()


def test_a_marker_that_is_a_pipe_or_a_device_does_not_stop_the_search(run: Path) -> None:
    for number, make in enumerate((os.mkfifo, lambda path: path.symlink_to("/dev/zero"))):
        left = run / "checkpoints" / f"step_000003.tmp-{number + 1}"
        left.mkdir()
        make(left / ".megatrain-partial")
    RunFolder(run).tidy()
    assert RunFolder(run).resume_point("auto") == newest(run)


def test_removing_a_checkpoint_follows_no_link(run: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("years of work")
    (run / "checkpoints" / "step_000001" / "link").symlink_to(precious)
    shutil.copytree(newest(run), tmp_path / "elsewhere")
    (run / "checkpoints" / "step_000000").symlink_to(tmp_path / "elsewhere")
    RunFolder(run).remove_old_checkpoints(1)
    assert (precious / "file").read_text() == "years of work"
    assert is_complete(tmp_path / "elsewhere")
    assert not (run / "checkpoints" / "step_000001").exists()


# ------------------------------------------------------------------ fuzz


NAMES = [
    "../secret", "/dev/zero", "/etc/passwd", "a/../../secret", "..", ".", "", "/", "link", "folder", "pipe", "zero", "a\0b",
    "..\\secret", "C:\\secret", "\u2025/secret", "\uff0e\uff0e/secret", "\u202e", "state", "STATE.JSON", "manifest.json",
    "x" * 5000, "sub/link", "sub/../../secret", "./state.json", "state//head.safetensors", "\ud800", "state.json/x", "nowhere",
    "../../../secret.safetensors", "out.safetensors",
]  # fmt: skip


def mutate(value: Any, rng: random.Random) -> Any:
    """A JSON value with one random change somewhere, which is a name as often as not."""
    places: list[tuple[Any, Any]] = []

    def collect(part: Any) -> None:
        for key in list(part) if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
            places.append((part, key))
            collect(part[key])

    collect(value)
    if not places:
        return rng.choice(JUNK)
    part, key = rng.choice(places)
    match rng.randrange(5):
        case 0 if isinstance(part, dict):
            part[rng.choice(NAMES)] = part.pop(key)
        case 1 if isinstance(part, dict):
            del part[key]
        case 2:
            part[key] = rng.choice(JUNK)
        case 3:
            part[key] = rng.choice(NAMES)
        case _ if isinstance(part, dict):
            part[rng.choice(NAMES)] = rng.choice([part[key], *JUNK])
    return value


def mutate_bytes(text: bytes, rng: random.Random) -> bytes:
    data, at = bytearray(text), rng.randrange(len(text))
    match rng.randrange(4):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = rng.choice([b"[" * 5000, b"1" * 5000, b"\xff", b"\0", b'"', b"NaN", b"{}"])
        case _:
            del data[at : at + rng.randrange(1, 50)]
    return bytes(data)


def test_no_mutated_manifest_or_index_leads_out_of_its_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every error is a UserError, no name outside is opened, and memory stays bounded."""
    real = weights.safe_open  # not written in Python, so that no audit hook sees what it opens

    def safe_open(file: Path, **words: Any) -> Any:
        sys.audit("open", str(file), "r", 0)
        return real(file, **words)

    monkeypatch.setattr(weights, "safe_open", safe_open)
    checkpoint, rng = newest(run), random.Random(0)
    (checkpoint / "link").symlink_to("../../../secret")
    (checkpoint / "zero").symlink_to("/dev/zero")
    (checkpoint / "out.safetensors").symlink_to("../../../secret.safetensors")
    shutil.copy(checkpoint / "state" / "head.safetensors", tmp_path / "secret.safetensors")
    (checkpoint / "folder").mkdir()
    (checkpoint / "sub").mkdir()
    (checkpoint / "sub" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(checkpoint / "pipe")
    texts = {
        name: (checkpoint / name).read_bytes()
        for name in ("manifest.json", "model.safetensors.index.json", "state.json")
    }
    readers: dict[str, list[Callable[[], object]]] = {
        "manifest.json": [
            lambda: verify(checkpoint),
            lambda: saved_extra(checkpoint),
            lambda: RunFolder(run).resume_point("auto"),
        ],
        "model.safetensors.index.json": [lambda: find_weight_files(checkpoint)],
        "state.json": [lambda: saved_extra(checkpoint)],
    }
    refused = dict.fromkeys(texts, 0)
    logging.disable(logging.WARNING)
    before, longest = peak_bytes(), 0
    try:
        for number in range(FUZZED):
            name = ("manifest.json", "manifest.json", "model.safetensors.index.json", "state.json")[number % 4]
            if rng.random() < 0.2:
                text = mutate_bytes(texts[name], rng)
            else:
                value = json.loads(texts[name])
                for _ in range(rng.randrange(1, 4)):
                    value = mutate(value, rng)
                text = (
                    sign(value) if name == "manifest.json" and isinstance(value, dict) else json.dumps(value).encode()
                )
            (checkpoint / name).write_bytes(text)
            if name == "state.json":
                put(checkpoint, name, text)
            for reader in readers[name]:
                with watching() as opened:
                    try:
                        reader()
                    except UserError as error:
                        refused[name] += 1
                        longest = max(longest, len(str(error)))
                assert outside(opened, run) == [], (number, text[:2000])
            for other, whole in texts.items():
                (checkpoint / other).write_bytes(whole)
    finally:
        logging.disable(logging.NOTSET)
    assert all(count > FUZZED // 10 for count in refused.values()), refused
    assert longest < 20_000, "a message that nobody can read"
    assert peak_bytes() - before < 300 << 20
    assert (tmp_path / "secret").read_bytes() == SECRET
    verify_only(checkpoint, ["state.json", "config.json"])


def peak_bytes() -> int:
    """The process's peak of resident memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10

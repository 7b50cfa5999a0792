"""Saves while training continues, and loads that stream in under the first forward, on the real engine."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from engines import host_engine
from families import BY_NAME, batch, build
from hosted import as_bits
from megatrain.checkpoint import files, host_planes, reader, writer
from megatrain.checkpoint.async_save import SaveCancelled
from megatrain.checkpoint.format import SafetensorsReader
from megatrain.checkpoint.host_checkpoints import HostCheckpoints
from megatrain.checkpoint.host_planes import HostPlanes, HostReader, StagingMemory
from megatrain.checkpoint.reader import OpenCheckpoint, is_complete, latest_complete
from megatrain.engine.host.engine import HostEngine
from megatrain.errors import EngineClosed, UserError
from megatrain.optim.adamw import AdamW

LLAMA = BY_NAME["llama"]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": {},
    "whole masters": {"compute_dtype": "fp32"},
    "accumulation_steps": {"accumulation_steps": 2},
    "resident": {"resident": "all"},
    "partly resident": {"resident": ["layer.0", "head"]},
    "keep": {"keep": "all"},
    "eaten": {"gradient_plane": False, "optim": AdamW(max_grad_norm=None, learning_rate=1e-3)},
}


def engine_of(family: str = "llama", **options: Any) -> HostEngine:
    standard = {"compute_dtype": "bf16", "threads": 2, "verify": "never", "optim": AdamW(learning_rate=1e-3)}
    return host_engine(build(BY_NAME[family], seed=0), device="cpu", **{**standard, **options})


def data(count: int, first: int = 0, family: str = "llama") -> list[dict[str, torch.Tensor]]:
    made = range(first, first + count)
    return [batch(BY_NAME[family], seed=seed, rows=4, tokens=16, kind="padded") for seed in made]


def train(engine: HostEngine, batches: list[dict[str, torch.Tensor]]) -> list[float | None]:
    return [engine.train_step(one).loss for one in batches]


def planes_of(engine: HostEngine) -> dict[str, torch.Tensor]:
    """A copy of every plane that is state, after all updates."""
    for _ in engine.named_parameters():
        pass
    return {
        f"{name}.{kind}": plane.clone()
        for name, planes in engine.store.units.items()
        for kind, plane in planes.state().items()
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(as_bits(one[name]), as_bits(other[name])), name


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Slows down every write of a save."""

    def slow(seconds: float) -> None:
        real = os.write

        def write(fd: int, piece: Any) -> int:
            if threading.current_thread().name == "checkpoint-save":
                time.sleep(seconds)
            return real(fd, piece)

        monkeypatch.setattr(os, "write", write)

    return slow


@pytest.fixture
def writer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer of a save starts only when a unit has been copied."""
    copied = threading.Event()
    ended, write = HostPlanes._copy_ended, host_planes.write_planned

    def copying(self: HostPlanes, *arguments: Any) -> None:
        ended(self, *arguments)
        copied.set()

    def writing(*arguments: Any) -> float:
        assert copied.wait(60)
        return write(*arguments)

    monkeypatch.setattr(HostPlanes, "_copy_ended", copying)
    monkeypatch.setattr(host_planes, "write_planned", writing)


@pytest.fixture
def held_writer(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The writer of a save starts only when this is set."""
    released, write = threading.Event(), host_planes.write_planned
    monkeypatch.setattr(host_planes, "write_planned", lambda *arguments: released.wait(60) and write(*arguments))
    return released


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def state_bytes(engine: HostEngine) -> int:
    return sum(plane.nbytes for planes in engine.store.units.values() for plane in planes.state().values())


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("buffer_bytes", [1, 10**9], ids=["no room", "room for all"])
def test_a_save_under_training_is_of_one_step_and_resumes_exactly(
    placement: str, buffer_bytes: int, tmp_path: Path, writer_behind: None
) -> None:
    """3 steps, save, 3 steps equal 6 steps; the save is written under the second 3 and read under the first forward."""
    options = PLACEMENTS[placement]
    batches = data(6)
    with engine_of(**options) as straight:
        losses = train(straight, batches)
        wanted = planes_of(straight)
    with engine_of(**options) as first:
        train(first, batches[:3])
        then = planes_of(first)
        save = first.save(tmp_path / "ckpt", {"at": 3}, background=True, buffer_bytes=buffer_bytes)
        assert train(first, batches[3:]) == losses[3:]
        assert_same(planes_of(first), wanted)
        progress = save.result()
    assert progress.copied_bytes > 0
    with engine_of(**options) as resumed:
        assert resumed.load(tmp_path / "ckpt") == {"at": 3}
        assert_same(planes_of(resumed), then)
    with engine_of(**options) as resumed:
        resumed.load(tmp_path / "ckpt", wait=False)
        assert (resumed.step, resumed.updates) == (3, 3)
        assert train(resumed, batches[3:]) == losses[3:]
        assert_same(planes_of(resumed), wanted)


def test_any_placement_reads_a_checkpoint_of_any_other(tmp_path: Path) -> None:
    """Files do not depend on where the units live."""
    with engine_of(resident=["layer.1"], keep="all") as engine:
        train(engine, data(2))
        engine.save(tmp_path / "ckpt")
        wanted = dict(engine.named_parameters())
    for options in PLACEMENTS.values():
        with engine_of(**options) as other:
            other.load(tmp_path / "ckpt", wait=False)
            for name, master in other.named_parameters():
                assert torch.equal(master, wanted[name]), name


@pytest.mark.parametrize("placement", ["host", "resident", "partly resident"])
def test_all_units_are_copied_before_their_updates_if_there_is_room(
    placement: str, tmp_path: Path, held_writer: threading.Event
) -> None:
    with engine_of(**PLACEMENTS[placement]) as engine:
        train(engine, data(1))
        then = planes_of(engine)
        save = engine.save(tmp_path / "ckpt", background=True)
        until(lambda: save.progress().copied_bytes == state_bytes(engine))
        train(engine, data(2))
        planes_of(engine)  # all updates have run, though nothing was written yet
        assert not save.done()
        held_writer.set()
        save.result()
        engine.load(tmp_path / "ckpt")
        assert_same(planes_of(engine), then)


def test_a_failed_copy_ahead_ends_the_save_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with engine_of(resident="all", keep="all") as engine:
        train(engine, data(1))
        with monkeypatch.context() as patch:
            patch.setattr(HostReader, "read", no_memory)
            save = engine.save(tmp_path / "one", background=True, on_error="warn")
            with pytest.raises(UserError, match=r"could not be saved: OSError.*no memory"):
                save.result(30)
        train(engine, data(2))
        assert not (tmp_path / "one").exists()
        engine.save(tmp_path / "two")


@pytest.mark.parametrize("refused_from", [0, 5])
def test_without_memory_for_copies_updates_wait_for_the_writer(
    refused_from: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: Callable[[float], None]
) -> None:
    """The save is complete, and neither side waits for a copy that nobody makes."""
    slow_disk(0.001)
    made, mapped = itertools.count(), StagingMemory.like

    def short(self: StagingMemory, plane: torch.Tensor) -> torch.Tensor:
        if next(made) >= refused_from:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return mapped(self, plane)

    monkeypatch.setattr(StagingMemory, "like", short)
    with engine_of() as engine:
        train(engine, data(1))
        then = planes_of(engine)
        save = engine.save(tmp_path / "ckpt", background=True)
        train(engine, data(2, 1))
        save.result(60)
        engine.load(tmp_path / "ckpt")
        assert_same(planes_of(engine), then)


@pytest.mark.parametrize("placement", ["host", "partly resident", "whole masters"])
def test_copies_use_the_prepared_memory(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: Callable[[float], None]
) -> None:
    """A save maps no more memory. Memory left over returns to the system at the end of the save, or of the engine."""
    made: list[StagingMemory] = []
    construct = StagingMemory.__init__
    monkeypatch.setattr(StagingMemory, "__init__", lambda self: (made.append(self), construct(self))[1])
    slow_disk(0.001)
    with engine_of(**PLACEMENTS[placement]) as engine:
        train(engine, data(1))
        then = planes_of(engine)
        size = state_bytes(engine)
        (memory,) = made
        engine.prepare_save()
        engine.prepare_save()  # while the first call works, or when everything is ready: no effect
        until(lambda: memory.ready_bytes == size)
        with monkeypatch.context() as patch:
            patch.setattr(host_planes, "Arena", lambda size: pytest.fail("mapped during the save"))
            save = engine.save(tmp_path / "ckpt", background=True)
            train(engine, data(2, 1))
            assert save.result(60).copied_bytes > 0
        assert memory.ready_bytes == 0
        engine.load(tmp_path / "ckpt")
        assert_same(planes_of(engine), then)
        engine.prepare_save(size // 2)
        until(lambda: memory.ready_bytes > 0)
        time.sleep(0.05)
        assert memory.ready_bytes <= size // 2
    assert memory.ready_bytes == 0


def test_no_more_memory_is_prepared_than_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_planes, "available_host_bytes", lambda: host_planes.RESERVED_BYTES + 5000)
    memory = StagingMemory()
    memory.prepare([4096, 1 << 20, 4096])
    until(lambda: memory.ready_bytes > 0)
    time.sleep(0.05)
    assert memory.ready_bytes == 4096
    assert memory.missing_bytes([torch.empty(1024), torch.empty(1024), torch.empty(512)]) == 4096 + 2048


def test_a_save_of_weights_copies_only_weights(tmp_path: Path, writer_behind: None) -> None:
    with engine_of() as engine:
        train(engine, data(1))
        save = engine.save(tmp_path / "weights", background=True, weights_only=True)
        train(engine, data(1, 1))
        planes = engine.store.units.values()
        assert 0 < save.result(60).copied_bytes <= sum(4 * each.layout.numel for each in planes)


@pytest.mark.parametrize("placement", ["host", "partly resident"])
def test_copies_use_no_more_memory_than_the_host_has(
    placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: Callable[[float], None]
) -> None:
    """A save on a full host makes updates wait, but does not end the run."""
    slow_disk(0.001)
    monkeypatch.setattr(host_planes, "available_host_bytes", lambda: host_planes.RESERVED_BYTES)
    with engine_of(**PLACEMENTS[placement]) as engine:
        train(engine, data(1))
        then = planes_of(engine)
        save = engine.save(tmp_path / "ckpt", background=True)
        train(engine, data(2, 1))
        assert save.result(60).copied_bytes == 0
        engine.load(tmp_path / "ckpt")
        assert_same(planes_of(engine), then)


def test_a_failed_copy_before_an_update_ends_the_save_and_not_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_writer: threading.Event
) -> None:
    def no_memory(self: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(HostPlanes, "_copy_ahead", lambda self: None)
    monkeypatch.setattr(HostReader, "read", no_memory)
    with engine_of(resident="all", keep="all") as engine, engine_of(resident="all", keep="all") as calm:
        train(engine, data(1))
        save = engine.save(tmp_path / "one", background=True, on_error="warn")
        train(engine, data(1, 1))
        held_writer.set()
        with pytest.raises(UserError, match=r"could not be saved: OSError.*no memory"):
            save.result(60)
        train(calm, data(2))
        assert_same(planes_of(engine), planes_of(calm))
    assert not (tmp_path / "one").exists()


def test_copies_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer_behind: None, slow_disk: Callable[[float], None]
) -> None:
    """By count: the copies that exist at one time never exceed the buffer."""
    slow_disk(0.001)
    most: list[int] = []
    claim = HostPlanes._claim

    def watched(self: HostPlanes, unit: str) -> bool:
        claimed = claim(self, unit)
        with self._changed:
            copies = list(self._copies.values())
        most.append(sum(plane.nbytes for copy in copies for plane in copy.state().values()))
        return claimed

    monkeypatch.setattr(HostPlanes, "_claim", watched)
    with engine_of() as engine:
        unit_bytes = {
            name: sum(p.nbytes for p in planes.state().values()) for name, planes in engine.store.units.items()
        }
        limit = 2 * unit_bytes["layer.0"]
        train(engine, data(1))
        save = engine.save(tmp_path / "ckpt", background=True, buffer_bytes=limit)
        train(engine, data(3))
        save.result()
    assert max(most) > 0
    assert max(most) <= max(limit, max(unit_bytes.values()))


def test_updates_of_written_units_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlap, by order and not by clocks: while the writer is held at the last unit, all others get their next update."""
    reached, released = threading.Event(), threading.Event()
    write_unit = writer.write_unit

    def held(folder: Any, unit: Any, *rest: Any) -> Any:
        if unit.name == "head":
            reached.set()
            assert released.wait(30)
        return write_unit(folder, unit, *rest)

    monkeypatch.setattr(writer, "write_unit", held)
    with engine_of() as engine:
        train(engine, data(1))
        before = planes_of(engine)
        save = engine.save(tmp_path / "ckpt", background=True, buffer_bytes=1)
        assert reached.wait(30)
        train(engine, data(1, 1))
        others = sum(len(unit.layout.entries) for unit in engine.structure.units[:-1])
        for _ in itertools.islice(engine.named_parameters(), others):
            pass  # waits for the updates of all units but the head
        changed = {
            name
            for name, planes in engine.store.units.items()
            if any(not torch.equal(before[f"{name}.{kind}"], plane) for kind, plane in planes.state().items())
        }
        assert changed == set(engine.store.units) - {"head"}
        released.set()
        save.result()
        train(engine, data(1, 2))


def test_one_save_at_a_time_and_each_reports_its_end(tmp_path: Path, slow_disk: Callable[[float], None]) -> None:
    slow_disk(0.005)
    order: list[str] = []
    with engine_of() as engine:
        train(engine, data(1))
        first = engine.save(tmp_path / "one", background=True, then=lambda _: order.append("one"))
        assert not first.done()
        progress = first.progress()
        assert 0 <= progress.written_bytes <= progress.total_bytes
        second = engine.save(tmp_path / "two", background=True, then=lambda _: order.append("two"))
        assert first.done()
        assert second.result().bytes_per_s > 0
    assert order == ["one", "two"]
    assert is_complete(tmp_path / "one") and is_complete(tmp_path / "two")


def test_close_waits_for_a_save_and_cancel_leaves_nothing(tmp_path: Path, slow_disk: Callable[[float], None]) -> None:
    slow_disk(0.005)
    with engine_of() as engine:
        train(engine, data(1))
        engine.save(tmp_path / "runs" / "one", background=True)
    assert is_complete(tmp_path / "runs" / "one")
    with pytest.raises(EngineClosed):
        engine.save(tmp_path / "runs" / "three")
    with engine_of() as engine:
        train(engine, data(1))
        save = engine.save(tmp_path / "runs" / "two", background=True)
        engine.cancel_save()
        with pytest.raises(SaveCancelled):
            save.result()
        train(engine, data(2, 1))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["one"]


def test_a_checkpoint_that_is_not_read_back_as_written_never_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk changes one byte; nobody is told that anything was saved."""
    told: list[int] = []
    real = os.write

    def lying(fd: int, piece: Any) -> int:
        if len(piece) > 1000:
            wrong = bytearray(piece)
            wrong[500] ^= 1
            return real(fd, bytes(wrong))
        return real(fd, piece)

    with engine_of() as engine:
        train(engine, data(1))
        monkeypatch.setattr(os, "write", lying)
        with pytest.raises(UserError, match=r"was not read back as it was written: .*checksum differs"):
            engine.save(tmp_path / "runs" / "one", then=lambda _: told.append(1))
        monkeypatch.undo()
        assert not told
        assert not list((tmp_path / "runs").iterdir())
        engine.save(tmp_path / "runs" / "one", then=lambda _: told.append(1))
        assert told == [1]


# ------------------------------------------------------------------ faults under training


def fail_at(monkeypatch: pytest.MonkeyPatch, at: int, code: int) -> list[str]:
    """Make the n-th system call of a save fail, in whichever thread. Returns the list of calls so far."""
    seen: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if threading.current_thread().name.startswith("checkpoint"):
                creates = name != "open" or arguments[1] & (os.O_CREAT | os.O_DIRECTORY)
                if creates and not (name == "mkdir" and Path(arguments[0]).is_dir()):
                    seen.append(name)
                    if len(seen) == at + 1:
                        raise OSError(code, os.strerror(code))
            return real(*arguments, **keywords)

        return wrapped

    for name in ("write", "fsync", "open", "mkdir", "rename"):
        monkeypatch.setattr(os, name, wrap(name, getattr(os, name)))
    return seen


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_fault_at_a_system_call_of_a_background_save(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous checkpoint stays, nothing is left of the new one, training is unaffected, and the next step reports it."""
    runs = tmp_path / "runs"
    batches = data(3)
    with engine_of() as straight:
        train(straight, batches)
        wanted = planes_of(straight)
    with engine_of() as engine:
        train(engine, batches[:1])
        engine.save(runs / "step_1")
        (tmp_path / "counted").mkdir()  # as `runs`: one system call less
        with monkeypatch.context() as patch:
            calls = fail_at(patch, -1, code)
            engine.save(tmp_path / "counted" / "step_1", background=True).result()
        calls = list(calls)
        assert {"write", "fsync", "open", "mkdir", "rename"} <= set(calls)
        last_rename = len(calls) - 1 - calls[::-1].index("rename")
        stride = 9 if code == errno.ENOSPC else 17
        for at in sorted({*range(0, last_rename, stride), *range(last_rename - 4, last_rename + 1)}):
            with monkeypatch.context() as patch:
                fail_at(patch, at, code)
                save = engine.save(runs / "step_2", background=True, buffer_bytes=1)
                save.wait()
            with pytest.raises(UserError, match=os.strerror(code)):
                engine.wait_saved()
            assert [path.name for path in runs.iterdir()] == ["step_1"], f"call {at}, {calls[at]}"
        assert latest_complete(runs) == runs / "step_1"
        train(engine, batches[1:])
        assert_same(planes_of(engine), wanted)


@pytest.mark.parametrize("on_error", ["warn", "stop"])
def test_the_next_step_reports_a_failed_save_once(
    on_error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An update that waited for the writer runs when the writer fails."""
    batches = data(4)
    with engine_of() as straight:
        train(straight, batches)
        wanted = planes_of(straight)
    with engine_of() as engine:
        train(engine, batches[:1])
        with monkeypatch.context() as patch:
            fail_at(patch, 40, errno.ENOSPC)
            save = engine.save(tmp_path / "ckpt", background=True, on_error=on_error, buffer_bytes=1)
            train(engine, batches[1:2]) if not save.done() else None
            save.wait()
        done = engine.step
        if on_error == "stop":
            with pytest.raises(UserError, match="No space left"):
                engine.train_step(batches[done])
        train(engine, batches[engine.step :])
        assert_same(planes_of(engine), wanted)
    assert ("training continues" in caplog.text) == (on_error == "warn")
    assert not (tmp_path / "ckpt").exists()


def test_rss_is_flat_over_twenty_saves(tmp_path: Path) -> None:
    """Background saves with copies leave nothing behind."""
    wide = LlamaConfig(
        vocab_size=2048, hidden_size=192, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(wide)
    process, sizes = psutil.Process(), []
    batches = data(1)
    with host_engine(model, device="cpu", compute_dtype="bf16", threads=1, verify="never") as engine:
        for number in range(26):
            train(engine, batches)
            save = engine.save(tmp_path / f"s{number}", background=True, buffer_bytes=10**9)
            train(engine, batches)
            save.result()
            files.remove_folder(tmp_path / f"s{number}")
            if number in (5, 25):
                gc.collect()
            sizes.append(process.memory_info().rss)
        size = state_bytes(engine)
    assert size > 20 << 20
    # The collector may give back some memory that is used again: compare with the most of the first saves.
    assert sizes[-1] - max(sizes[:6]) < size / 10, [rss >> 10 for rss in sizes]


# ------------------------------------------------------------------ loads


def test_the_first_forward_starts_when_the_first_units_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By order: the reader is held before the last layer until the first layer was computed."""
    with engine_of() as engine:
        train(engine, data(2))
        engine.save(tmp_path / "ckpt")
        wanted = train(engine, data(1, 2))
    reached_layer = threading.Event()
    restore, forward = OpenCheckpoint.restore, LlamaDecoderLayer.forward
    last = f"layer.{len(engine.structure.layers) - 1}"
    restored: list[str] = []

    def held(self: OpenCheckpoint, unit: Any, *rest: Any) -> None:
        if unit.name == last:
            assert reached_layer.wait(30), "the forward waits for layers before it needs them"
        restore(self, unit, *rest)
        restored.append(unit.name)

    def noting(self: LlamaDecoderLayer, hidden: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        outputs = forward(self, hidden, *arguments, **keywords)
        if hidden.device.type == "cpu":
            reached_layer.set()
        return outputs

    monkeypatch.setattr(OpenCheckpoint, "restore", held)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", noting)
    with engine_of() as again:
        again.load(tmp_path / "ckpt", wait=False)
        assert last not in restored
        assert train(again, data(1, 2)) == wanted
        assert last in restored


def test_a_load_needs_memory_for_the_weights_of_one_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory, by count: the reader frees what it allocated before the next unit."""
    with engine_of() as engine:
        engine.save(tmp_path / "ckpt")
        largest = max(planes.layout.numel for planes in engine.store.units.values()) * 2
        allocated: list[int] = [0]
        most = [0]
        restore, read = OpenCheckpoint.restore, SafetensorsReader.read

        def counting_restore(self: OpenCheckpoint, unit: Any, *rest: Any) -> None:
            allocated[0] = 0
            restore(self, unit, *rest)

        def counting_read(self: SafetensorsReader, name: str) -> torch.Tensor:
            tensor = read(self, name)
            allocated[0] += tensor.nbytes
            most[0] = max(most[0], allocated[0])
            return tensor

        monkeypatch.setattr(OpenCheckpoint, "restore", counting_restore)
        monkeypatch.setattr(SafetensorsReader, "read", counting_read)
        engine.load(tmp_path / "ckpt")
    assert 0 < most[0] <= largest


def flip_last_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("resident", [(), ("layer.1",)])
def test_after_a_failed_load_the_engine_refuses_to_compute(wait: bool, resident: Any, tmp_path: Path) -> None:
    """Some units are the checkpoint's, some are not: nobody may train on that, save it, or read it."""
    with engine_of(resident=resident) as engine:
        train(engine, data(1))
        engine.save(tmp_path / "runs" / "step_1")
        train(engine, data(1, 1))
        engine.save(tmp_path / "runs" / "step_2")
        flip_last_byte(tmp_path / "runs" / "step_2" / "state" / "layer.1.safetensors")
        named = r"layer\.1\.safetensors.*tensor lo/.*the newest other one is .*step_1"

        def load_and_train() -> None:
            engine.load(tmp_path / "runs" / "step_2", wait=wait)
            engine.train_step(data(1)[0])

        with pytest.raises(UserError, match=f"(?s){named}"):
            load_and_train()
        for call in (
            lambda: engine.train_step(data(1)[0]),
            lambda: engine.eval_step(data(1)[0]),
            lambda: list(engine.named_parameters()),
            lambda: engine.save(tmp_path / "runs" / "step_3"),
        ):
            with pytest.raises(UserError, match=f"(?s)mixture: .*{named}"):
                call()
        engine.load(tmp_path / "runs" / "step_1")
        train(engine, data(1, 1))
        engine.save(tmp_path / "runs" / "step_3")


def test_a_checkpoint_refused_before_it_is_read_changes_nothing(tmp_path: Path) -> None:
    with engine_of() as engine:
        train(engine, data(1))
        before = planes_of(engine)
        with pytest.raises(UserError, match="no manifest"):
            engine.load(tmp_path)
        assert_same(planes_of(engine), before)
        train(engine, data(1))


def test_an_engine_without_weights_computes_nothing_before_a_load(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build(LLAMA, seed=0).save_pretrained(folder)
    options: dict[str, Any] = {"device": "cpu", "compute_dtype": "bf16", "threads": 1, "verify": "never"}
    with host_engine(folder, **options) as engine:
        train(engine, data(1))
        engine.save(tmp_path / "ckpt")
        wanted = train(engine, data(1, 1))
    with host_engine(folder, init="empty", **options) as empty:
        for call in (lambda: empty.train_step(data(1)[0]), lambda: empty.save(tmp_path / "nothing")):
            with pytest.raises(UserError, match="holds no weights"):
                call()
        empty.load(tmp_path / "ckpt", wait=False)
        assert train(empty, data(1, 1)) == wanted


def test_a_load_can_be_cancelled_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        train(engine, data(1))
        engine.save(tmp_path / "ckpt")
        wanted = planes_of(engine)
    restore = OpenCheckpoint.restore

    def slow(self: OpenCheckpoint, *arguments: Any) -> None:
        time.sleep(0.05)
        restore(self, *arguments)

    monkeypatch.setattr(OpenCheckpoint, "restore", slow)
    with engine_of() as again:
        again.load(tmp_path / "ckpt", wait=False)
        again.load(tmp_path / "ckpt", wait=False)
        assert_same(planes_of(again), wanted)
        train(again, data(1))
    with engine_of() as closed_early:
        closed_early.load(tmp_path / "ckpt", wait=False)
        started = time.monotonic()
    assert time.monotonic() - started < 0.04 * len(closed_early.structure.units)


def test_device_copies_of_buffers_are_refreshed_by_a_load(tmp_path: Path) -> None:
    """A router's correction bias lives on the device, too; a load must reach that copy, here another tensor on the CPU."""
    with engine_of("deepseek_v3") as engine:
        name = next(n for n in engine.buffers if "correction_bias" in n)
        engine.buffers[name].fill_(0.5)
        engine.save(tmp_path / "ckpt")
    with engine_of("deepseek_v3") as again:
        mirrors = {n: buffer.clone() for n, buffer in again.buffers.items()}
        checkpoints = HostCheckpoints(
            again.structure, again.store, again.optim, again.buffers, mirrors, None, False, again.device, updates=dict
        )
        loading, _ = checkpoints.start_load(tmp_path / "ckpt")
        loading.wait()
        assert bool((mirrors[name] == 0.5).all())
        assert bool((again.buffers[name] == 0.5).all())


def test_code_of_the_source_is_copied_only_if_it_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build(LLAMA, seed=0).save_pretrained(folder)
    (folder / "modeling_own.py").write_text("x = 1\n")
    for trusted in (True, False):
        options: dict[str, Any] = {"device": "cpu", "compute_dtype": "bf16", "threads": 1, "verify": "never"}
        with host_engine(folder, trust_remote_code=trusted, **options) as engine:
            engine.save(tmp_path / f"ckpt_{trusted}")
        assert (tmp_path / f"ckpt_{trusted}" / "modeling_own.py").exists() == trusted


def test_weights_only_in_the_background(tmp_path: Path) -> None:
    with engine_of() as engine:
        train(engine, data(1))
        save = engine.save(tmp_path / "weights", background=True, weights_only=True)
        train(engine, data(1, 1))
        save.result()
        with pytest.raises(UserError, match="weights only"):
            engine.load(tmp_path / "weights")
        train(engine, data(1, 2))
    assert reader.latest_complete(tmp_path) is None

"""Checkpoints of the host engine on several ranks: today's format, whatever the number of ranks that wrote or reads it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import families
import mesh_ranks
from engines import host_engine
from megatrain.checkpoint import shared_write
from megatrain.checkpoint.files import FilesWriter
from megatrain.checkpoint.format import MANIFEST_FILE
from megatrain.device.shards import Shards
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.errors import UserError
from megatrain.optim.adamw import AdamW

FAMILY, OPTIM = families.BY_NAME["llama"], AdamW(learning_rate=1e-2, max_grad_norm=0.1)
BATCHES = [families.batch(FAMILY, seed=s, rows=5, tokens=24, kind="packed") for s in range(5)]


def engine(seed: int = 1, **words: Any) -> HostEngine:
    group = dist.group.WORLD if dist.is_initialized() else None
    model = families.build(words.pop("family", FAMILY), seed=seed, tie=words.pop("tie", True))
    options = {"compute_dtype": "bf16", "threads": 1, **words}
    optim = replace(OPTIM, moments=options.pop("moments", "fp32"))
    return host_engine(model, group=group, device="cpu", verify="never", optim=optim, **options)


def records(folder: Path) -> dict[str, Any]:
    """Sizes and checksums of the tensors' files."""
    files = json.loads((folder / MANIFEST_FILE).read_text())["files"]
    return {name: record for name, record in files.items() if name.endswith(".safetensors")}


def steps(trained: HostEngine | MeshEngine, numbers: range) -> list[float | None]:
    return [trained.train_step(BATCHES[number]).loss for number in numbers]


def weights(trained: HostEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trained.named_parameters()}


def save_and_go_on(folder: Path, words: dict[str, Any]) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    """Two steps, a save in the background, and two more steps meanwhile."""
    with engine(**words) as trained:
        losses = steps(trained, range(2))
        handle = trained.save(folder, extra={"note": "here"}, background=True)
        losses += steps(trained, range(2, 4))
        handle.result()
        trained.wait_saved()
        return losses, weights(trained)


def resume(folder: Path, again: Path | None, words: dict[str, Any]) -> tuple[list[float | None], Any]:
    """Load, save again unchanged, and take the steps that followed the first save."""
    with engine(seed=2, **words) as trained:
        assert trained.load(folder, wait=False) == {"note": "here"}
        if again is not None:
            trained.save(again, extra={"note": "here"})
        return steps(trained, range(2, 4)), weights(trained)


@pytest.mark.parametrize(
    ("words", "worlds"),
    [
        ({}, (1, 2, 3)),
        ({"moments": "int8"}, (1, 2, 3)),
        ({"resident": ["embedding", "layer.1"], "tie": False}, (2, 3)),
        ({"family": families.BY_NAME["qwen3_moe"]}, (1,)),
    ],
    ids=["host", "int8", "resident", "moe"],
)
def test_any_number_of_ranks_reads_what_another_wrote(tmp_path, words, worlds):
    """The same number continues bit for bit; others write the same bytes again, and differ by the order of sums from then on."""
    first = tmp_path / "first"
    (losses, trained), *_ = mesh_ranks.run(2, save_and_go_on, first, words)
    for world in worlds:
        again = tmp_path / f"again-{world}"
        (found, end), *_ = mesh_ranks.run(world, resume, first, again, words)
        assert records(again) == records(first)
        if world == 2:
            assert found == losses[2:]
            assert all(torch.equal(end[name], trained[name]) for name in trained)
        assert found == pytest.approx(losses[2:], rel=2e-3)


def on_a_host(work: Any, *given: Any) -> Any:
    """`work` with the environment of two hosts of two ranks: the first rank of each host writes."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank() % 2)
    return work(*given)


def test_hosts_with_a_replica_each_write_and_read_the_same_checkpoint(tmp_path):
    """Each host's writer takes its units from its own host, and updates go on meanwhile."""
    first, again, alone = (tmp_path / name for name in ("first", "again", "alone"))
    words = {"resident": ["embedding", "layer.1"], "tie": False}
    hosts = {**words, "replicas": 2}
    (losses, trained), *_ = mesh_ranks.run(4, on_a_host, save_and_go_on, first, hosts)
    (found, end), *_ = mesh_ranks.run(4, on_a_host, resume, first, again, hosts)
    assert records(again) == records(first)
    assert found == losses[2:] and all(torch.equal(end[name], trained[name]) for name in trained)
    mesh_ranks.run(2, resume, first, alone, words)
    assert records(alone) == records(first)


def test_hosts_without_a_common_folder(tmp_path):
    """The second host does not see the folder: rank 0 writes all units, from its own host's replica, and updates go on."""

    def on_a_blind_host(*given: Any) -> Any:
        if dist.get_rank() >= 2:
            shared_write._is_marked = lambda *_: False  # type: ignore[assignment]
        return on_a_host(save_and_go_on, *given)

    first, again = tmp_path / "first", tmp_path / "again"
    (losses, _), *others = mesh_ranks.run(4, on_a_blind_host, first, {"replicas": 2, "resident": ["embedding"]})
    assert all(found == losses for found, _ in others)
    mesh_ranks.run(1, resume, first, again, {})
    assert records(again) == records(first)


def test_a_save_finds_replicas_that_differ(tmp_path):
    """One element of the gradient on one rank, in one step, is rounded differently. `on_error` cannot make that a warning."""

    def work() -> str:
        reduce = Shards.reduce

        def rounding_differently(self: Shards, out: torch.Tensor, buffer: torch.Tensor) -> None:
            reduce(self, out, buffer)
            out[0] += 1e-3

        with engine(replicas=2, resident=["embedding"]) as trained:
            steps(trained, range(1))
            trained.save(tmp_path / "equal")
            if dist.get_rank() == 3:
                Shards.reduce = rounding_differently  # type: ignore[method-assign]
            steps(trained, range(1, 2))
            Shards.reduce = reduce  # type: ignore[method-assign]
            trained.save(tmp_path / "different", background=True, on_error="warn")
            with pytest.raises(UserError, match="different values of the same part of") as found:
                trained.wait_saved()
            return str(found.value)

    results = mesh_ranks.run(4, on_a_host, work)
    assert len(set(results)) == 1 and "ranks 1 and 3" in results[0]
    assert [folder.name for folder in tmp_path.iterdir()] == ["equal"]


def test_the_mesh_engine_continues_and_hands_back(tmp_path):
    first, back = tmp_path / "first", tmp_path / "back"
    words = {"compute_dtype": "fp32", "tie": False}
    (losses, _), *_ = mesh_ranks.run(2, save_and_go_on, first, words)

    def on_the_mesh() -> list[float | None]:
        model = families.build(FAMILY, seed=3, tie=False)
        with MeshEngine(model, MeshPlan(Layout(shard=2), compute_dtype="fp32"), device="cpu", optim=OPTIM) as mesh:
            mesh.load(first)
            found = steps(mesh, range(2, 3))
            mesh.save(back, extra={"note": "here"})
            return found

    found, *_ = mesh_ranks.run(2, on_the_mesh)

    def on_hosts() -> list[float | None]:
        with engine(seed=4, **words) as trained:
            trained.load(back)
            return steps(trained, range(3, 4))

    more, *_ = mesh_ranks.run(2, on_hosts)
    assert found + more == pytest.approx(losses[2:], rel=1e-5)


def test_a_full_disk_on_the_writer_ends_the_save_on_all_ranks_and_training_goes_on(tmp_path):
    def work() -> list[float | None]:
        append = FilesWriter.write_tensors

        def full(self, name, *rest):
            if "layer" in name or "00002" in name:
                raise UserError("no space left", str(name))
            return append(self, name, *rest)

        FilesWriter.write_tensors = full  # type: ignore[method-assign]
        with engine() as trained:
            steps(trained, range(1))
            trained.save(tmp_path / "checkpoint", background=True, on_error="warn")
            losses = steps(trained, range(1, 4))
            trained.wait_saved()
            return losses

    results = mesh_ranks.run(2, work)
    assert results[0] == results[1]
    assert list(tmp_path.iterdir()) == []

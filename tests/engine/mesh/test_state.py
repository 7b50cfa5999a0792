"""Both engines and all layouts share one checkpoint format."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import families
import mesh_ranks as ranks
from engines import host_engine
from megatrain.checkpoint.format import SafetensorsReader, read_manifest
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.errors import UserError
from megatrain.optim.adamw import AdamW
from mesh_parity import digests

FAMILY = families.BY_NAME["llama"]
OPTIM = AdamW(learning_rate=1e-2, max_grad_norm=0.5)
LAYOUTS = {
    "tensor": Layout(tensor=2, shard=2),
    "pipeline": Layout(pipeline=4, shard=1, schedule="zb1p"),
    "vee": Layout(pipeline=2, virtual=2, replicate=2, shard=1, schedule="zbv"),
    "context": Layout(context=2, tensor=2, shard=1),
}
BATCHES = [families.batch(FAMILY, seed=s, rows=8, tokens=16, kind="packed") for s in range(4)]


def model(tie=True):
    return families.build(FAMILY, seed=1, tie=tie)


def train(source, layout, steps, *, load=None, save=None):
    """On a rank: the losses of the steps, and the engine's state at the end."""
    with MeshEngine(source, MeshPlan(layout, compute_dtype="fp32"), optim=OPTIM, device="cpu") as engine:
        extra = engine.load(load) if load else None
        losses = [engine.train_step(BATCHES[i]).loss for i in steps]
        if save:
            engine.save(save, extra={"note": "here"})
        return losses, dict(engine.named_parameters()), extra, digests(engine), engine.step


@pytest.fixture(scope="module")
def uninterrupted():
    with host_engine(model(), device="cpu", compute_dtype="fp32", optim=OPTIM, threads=1) as engine:
        return [engine.train_step(batch).loss for batch in BATCHES]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after two steps from each layout, and from the host engine."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, layout in LAYOUTS.items():
        results = ranks.run(4, lambda layout=layout, name=name: train(model(), layout, [0, 1], save=folder / name))
        torch.save(results[0][1], folder / f"{name}.weights")
    with host_engine(model(), device="cpu", compute_dtype="fp32", optim=OPTIM, threads=1) as engine:
        for batch in BATCHES[:2]:
            engine.train_step(batch)
        engine.save(folder / "host", extra={"note": "here"})
    return folder


PAIRS = [(a, b) for a, b in itertools.product([*LAYOUTS, "host"], LAYOUTS) if a != b]
LEFT_TO_SLOW = {("tensor", "context"), ("pipeline", "vee"), ("vee", "tensor"), ("context", "pipeline")}
"""Each of their sources and targets occurs in three other pairs."""


@pytest.mark.parametrize(
    ("source", "target"), [pytest.param(*p, marks=[pytest.mark.slow] if p in LEFT_TO_SLOW else []) for p in PAIRS]
)
def test_any_layout_continues_from_any_other(source, target, saved, uninterrupted):
    """Weights and moments are restored: the losses are those of the uninterrupted run."""
    results = ranks.run(4, lambda: train(model(), LAYOUTS[target], [2, 3], load=saved / source))
    losses, _, extra, _, step = results[0]
    assert extra == {"note": "here"} and step == 4
    assert losses == pytest.approx(uninterrupted[2:], rel=1e-5)


@pytest.mark.parametrize("source", LAYOUTS)
def test_the_host_engine_continues_from_a_mesh_checkpoint(source, saved, uninterrupted):
    with host_engine(model(), device="cpu", compute_dtype="fp32", optim=OPTIM, threads=1) as engine:
        assert engine.load(saved / source) == {"note": "here"}
        losses = [engine.train_step(batch).loss for batch in BATCHES[2:]]
    assert losses == pytest.approx(uninterrupted[2:], rel=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_layout_continues_bit_for_bit(name, saved):
    """2 steps, save, load, 2 steps equal 4 steps."""
    layout = LAYOUTS[name]
    straight = ranks.run(4, lambda: train(model(), layout, [0, 1, 2, 3])[3])
    resumed = ranks.run(4, lambda: train(model(), layout, [2, 3], load=saved / name)[3])
    assert straight == resumed


@pytest.mark.parametrize("name", LAYOUTS)
def test_transformers_loads_a_mesh_checkpoint(name, saved):
    """It has the keys of the whole model, from all stages, and a tied tensor once."""
    loaded, info = AutoModelForCausalLM.from_pretrained(saved / name, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    trained = torch.load(saved / f"{name}.weights")
    for key, weight in loaded.named_parameters():
        assert torch.allclose(weight.float(), trained[key], rtol=2**-8, atol=0), key


def test_a_model_folder_is_read_by_slices(tmp_path):
    model(tie=False).save_pretrained(tmp_path)
    layout = Layout(tensor=2, pipeline=2)
    weights = ranks.run(4, lambda: train(tmp_path, layout, [])[1])[0]
    for name, weight in model(tie=False).named_parameters():
        assert torch.equal(weights[name], weight), name


def test_random_initialisation_is_the_same_in_every_layout(tmp_path):
    model().config.save_pretrained(tmp_path)

    def work(layout):
        with MeshEngine(
            tmp_path, MeshPlan(layout, compute_dtype="fp32"), init="random", seed=3, device="cpu"
        ) as engine:
            return dict(engine.named_parameters())

    one = ranks.run(1, work, Layout())[0]
    four = ranks.run(4, work, Layout(tensor=2, pipeline=2))[0]
    with host_engine(tmp_path, device="cpu", compute_dtype="fp32", init="random", seed=3, threads=1) as engine:
        host = dict(engine.named_parameters())
    for name, weight in host.items():
        assert torch.equal(one[name], weight) and torch.equal(four[name], weight), name


def test_a_failed_save_fails_on_every_rank(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("x")

    def work():
        with MeshEngine(model(), MeshPlan(Layout(pipeline=2), compute_dtype="fp32"), device="cpu") as engine:
            with pytest.raises(UserError) as error:
                engine.save(tmp_path / "there")
            return str(error.value), engine.train_step(BATCHES[0]).loss

    first, second = ranks.run(2, work)
    assert "rank 0 could not write" in second[0] and "rank 0" not in first[0]
    assert first[1] == second[1]


@pytest.mark.parametrize("writers", [[0], [1, 0]], ids=str)
def test_buffers_of_other_stages_are_saved_as_they_were_loaded(writers, tmp_path):
    """A router's correction bias is part of the checkpoint; the rank that writes a unit need not hold it."""
    family = families.BY_NAME["deepseek_v3"]

    def work(seed, load, save):
        source = families.build(family, seed=seed)
        with MeshEngine(
            source, MeshPlan(Layout(pipeline=2), compute_dtype="fp32"), optim=OPTIM, device="cpu"
        ) as engine:
            engine.checkpoint_policy.writers = writers
            if load:
                engine.load(load)
            engine.save(save)

    ranks.run(2, work, 1, None, tmp_path / "first")
    ranks.run(2, work, 2, tmp_path / "first", tmp_path / "second")
    weights = [{}, {}]
    for found, name in zip(weights, ("first", "second"), strict=True):
        for file in (tmp_path / name).glob("*.safetensors"):
            found |= load_file(file)
    assert any("e_score_correction_bias" in key and weight.any() for key, weight in weights[0].items())
    assert weights[0].keys() == weights[1].keys()
    for key, weight in weights[0].items():
        assert torch.equal(weight, weights[1][key]), key


def test_experts_that_are_split_over_ranks_are_saved_whole(tmp_path):
    """A mixture of experts under tensor parallelism: the host engine continues from its checkpoint."""
    family = families.BY_NAME["mixtral"]
    batches = [families.batch(family, seed=s, rows=8, tokens=16, kind="packed") for s in range(3)]

    def first_steps():
        source = families.build(family, seed=1)
        with MeshEngine(
            source, MeshPlan(Layout(tensor=2, shard=2), compute_dtype="fp32"), optim=OPTIM, device="cpu"
        ) as engine:
            losses = [engine.train_step(batch).loss for batch in batches[:2]]
            engine.save(tmp_path / "saved")
            return losses

    losses = ranks.run(4, first_steps)[0]
    with host_engine(
        families.build(family, seed=1), device="cpu", compute_dtype="fp32", optim=OPTIM, threads=1
    ) as engine:
        straight = [engine.train_step(batch).loss for batch in batches]
        engine.load(tmp_path / "saved")
        resumed = engine.train_step(batches[2]).loss
    assert losses == pytest.approx(straight[:2], rel=1e-5)
    assert resumed == pytest.approx(straight[2], rel=1e-5)


def test_a_checkpoint_of_a_model_that_computes_something_else_is_refused(tmp_path):
    other = families.build(replace(FAMILY, overrides={**FAMILY.overrides, "hidden_act": "gelu"}), seed=1)
    with host_engine(other, device="cpu", compute_dtype="fp32", optim=OPTIM, threads=1) as engine:
        engine.save(tmp_path / "saved")

    def work():
        with MeshEngine(model(), MeshPlan(Layout(shard=2), compute_dtype="fp32"), optim=OPTIM, device="cpu") as engine:
            with pytest.raises(UserError, match="hidden_act is 'gelu' there"):
                engine.load(tmp_path / "saved")
            return engine.train_step(BATCHES[0]).loss  # nothing was changed

    assert all(ranks.run(2, work))


def test_each_rank_reads_its_slices_and_all_together_verify_every_byte(tmp_path):
    """A flipped byte is found by the rank that verifies it, and no rank continues."""

    def work():
        plan = MeshPlan(Layout(tensor=2, pipeline=2), compute_dtype="fp32")
        with MeshEngine(model(), plan, optim=OPTIM, device="cpu") as engine:
            engine.train_step(BATCHES[0])
            engine.save(tmp_path / "saved")
            before = digests(engine)
            engine.train_step(BATCHES[1])
            whole, verified = [], []
            read, verify = SafetensorsReader.read_into, SafetensorsReader.verify
            SafetensorsReader.read_into = lambda self, name, out: (whole.append(name), read(self, name, out))[1]
            SafetensorsReader.verify = lambda self, name, piece: (verified.append(name), verify(self, name, piece))[1]
            engine.load(tmp_path / "saved")
            assert digests(engine) == before and engine.step == 1
            seen = list(verified)
            dist.barrier()
            file = tmp_path / "saved" / "state" / "layer.2.safetensors"
            if dist.get_rank() == 0:
                data = bytearray(file.read_bytes())
                data[-5] ^= 1
                file.write_bytes(data)
            dist.barrier()
            with pytest.raises(UserError) as error:
                engine.load(tmp_path / "saved")
            # The ranks hold partly old and partly new state: nobody may compute with it, or save it.
            for refused in (lambda: engine.train_step(BATCHES[2]), lambda: engine.save(tmp_path / "mixture")):
                with pytest.raises(UserError, match="the weights are a mixture"):
                    refused()
            dist.barrier()
            if dist.get_rank() == 0:
                data[-5] ^= 1
                file.write_bytes(data)
            dist.barrier()
            engine.load(tmp_path / "saved")
            assert digests(engine) == before
            return whole, seen, str(error.value)

    results = ranks.run(4, work)
    assert all(whole == [] for whole, _, _ in results)
    manifest = read_manifest(tmp_path / "saved", sizes=False)
    everything = {name for record in manifest.files.values() for name in record.tensors}
    assert {name for _, verified, _ in results for name in verified} == everything
    said = [words for _, _, words in results]
    assert sum("layer.2.safetensors" in words and "checksum differs" in words for words in said) == 1
    assert sum("another rank could not read the checkpoint" in words for words in said) == 3

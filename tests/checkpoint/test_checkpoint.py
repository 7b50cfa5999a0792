"""Checkpoints: transformers loads them as they are, and training state comes back bit for bit."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from families import build
from hosted import (
    BY_NAME,
    Hosted,
    as_bits,
    assert_same_state,
    host,
    host_folder,
    load,
    plan_of,
    save,
    save_as,
    save_family,
    trained,
)
from megatrain.checkpoint import reader, writer
from megatrain.checkpoint.files import FolderWriter
from megatrain.checkpoint.format import MANIFEST_FILE, read_manifest
from megatrain.checkpoint.reader import is_complete, latest_complete
from megatrain.errors import UserError
from megatrain.models.build import build_from_memory, refuse_other_config

FAMILIES = ["llama", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "nemotron_h", "qwen3_next"]


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_family("llama", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_state_comes_back_bit_for_bit(name: str, split: bool, tmp_path: Path):
    source = tmp_path / "source"
    save_family(name, source)
    hosted = trained(source, split)
    target = save(hosted, tmp_path / "ckpt", source, loss_scale={"scale": 2.0})

    again = host_folder(source, split)
    assert load(target, again) == {"step": 1, "updates": 0, "seed": 0, "loss_scale": {"scale": 2.0}, "extra": {}}
    assert_same_state(hosted, again)
    # The other kind of store reads the same masters from the same files.
    other = host_folder(source, not split)
    load(target, other)
    masters = hosted.masters()
    assert all(torch.equal(master, masters[key]) for key, master in other.masters().items())


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_it_as_it_is(name: str, tmp_path: Path):
    """Keys and shapes are the source's, dtypes are those that transformers computes in."""
    source = tmp_path / "source"
    save_family(name, source)
    hosted = trained(source)
    target = save(hosted, tmp_path / "ckpt", source)
    mine, theirs = read_all(target), read_all(source)
    assert {key: tensor.shape for key, tensor in mine.items()} == {key: t.shape for key, t in theirs.items()}
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == mine.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in mine.values())

    loaded, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    assert loaded.dtype == torch.bfloat16, "config and weights agree"
    for key, parameter in loaded.named_parameters():
        unit = next(u for u in hosted.structure.units if key in {full for _, full in u.full_names()})
        local = key.removeprefix(unit.prefix)
        planes = hosted.store.units[unit.name]
        kept = parameter.dtype == torch.float32
        expected = planes.read_master(local) if kept else unit.layout.view(planes.hi, local)
        assert torch.equal(parameter, expected), key
    for key, buffer in hosted.buffers.items():
        assert torch.equal(loaded.state_dict()[key], buffer), key


def test_size_is_that_of_bf16_weights(llama: Path, tmp_path: Path):
    """2 bytes a parameter for transformers, 10 beside them; no weight is stored twice."""
    hosted = trained(llama)
    target = save(hosted, tmp_path / "ckpt", llama)
    params = hosted.structure.param_count
    weights = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    state = sum(file.stat().st_size for file in target.glob("state/*"))
    headers = 200 * 2 * len(hosted.masters())
    assert 2 * params < weights < 2 * params + headers
    assert 10 * params < state < 10 * params + 3 * headers
    total = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    assert total <= plan_of(hosted, tmp_path / "other", {}, llama).total_bytes


def test_tied_weight_is_one_entry_and_stays_tied(tmp_path: Path):
    source = tmp_path / "source"
    save_family("llama", source, tie=True)
    hosted = trained(source)
    target = save(hosted, tmp_path / "ckpt", source)
    assert "lm_head.weight" not in read_all(target)
    loaded = AutoModelForCausalLM.from_pretrained(target).eval()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    # Not masters in torch's bf16: hi rounds ties away from zero and torch to even, and one random master in 65,536 is a tie.
    rounded = {
        full: unit.layout.view(hosted.store.units[unit.name].hi, local)
        for unit in hosted.structure.units
        for local, full in unit.full_names()
    }
    expected.load_state_dict(rounded, strict=False)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_everything_but_weights_is_copied(llama: Path, tmp_path: Path):
    config = json.loads((llama / "config.json").read_text())
    config["torch_dtype"] = "float32"
    config.pop("dtype", None)
    config["a_key_of_the_source"] = [1]
    (llama / "config.json").write_text(json.dumps(config))
    files = {
        "tokenizer.json": "{}", "tokenizer_config.json": "{}", "special_tokens_map.json": "{}", "vocab.txt": "a",
        "chat_template.jinja": "{{ messages }}", "additional_chat_templates/tool.jinja": "x", "tokenizer.model": "m",
        "generation_config.json": '{"eos_token_id": [2, 3]}', "LICENSE": "free",
    }  # fmt: skip
    left_out = {"pytorch_model.bin": "x", "modeling_odd.py": "x", ".hidden": "x", "pytorch_model.bin.index.json": "{}"}
    (llama / "additional_chat_templates").mkdir()
    for name, text in (files | left_out).items():
        (llama / name).write_text(text)
    hosted = trained(llama)
    target = save(hosted, tmp_path / "ckpt", llama)
    assert all((target / name).read_text() == text for name, text in files.items())
    assert not any((target / name).exists() for name in left_out)
    saved = json.loads((target / "config.json").read_text())
    assert saved == config | {"torch_dtype": "bfloat16"}
    save_as(hosted, tmp_path / "trusted", {}, llama, trust_remote_code=True)
    assert (tmp_path / "trusted" / "modeling_odd.py").exists()


def test_what_a_source_folder_holds_besides_a_model_stays_there(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Links to private files are not followed, and adapters, which transformers would load, are not taken along."""
    (tmp_path / "private.txt").write_text("private")
    (llama / "real.txt").write_text("mine")
    links = {"inside.txt": "real.txt", "key.txt": "../private.txt", "zero.txt": "/dev/zero", "gone.txt": "nowhere"}
    for name, target in links.items():
        (llama / name).symlink_to(target)
    hosted, again = trained(llama), host_folder(llama)
    (llama / "additional_chat_templates").mkdir()  # such a template is not even read
    (llama / "additional_chat_templates" / "key.jinja").symlink_to(tmp_path / "private.txt")
    for name in (
        "adapter_config.json",
        "adapter_model.safetensors",
        "adapter_model.bin",
        "odd\\name.txt",
        "new\nline.txt",
    ):
        (llama / name).write_text("{}")
    (llama / "Readme.md").write_text("1")
    (llama / "README.md").write_text("2")
    with caplog.at_level("WARNING", "megatrain"):
        for step in (1, 2):
            target = save(hosted, tmp_path / f"step_{step}", llama, step=step)
    assert (target / "inside.txt").read_text() == "mine"
    assert not (target / "inside.txt").is_symlink()
    kept = {path.name for path in target.rglob("*")}
    left_out = ["key.txt", "zero.txt", "gone.txt", "key.jinja", "adapter_config.json", "adapter_model.safetensors"]
    left_out += ["adapter_model.bin", "odd\\name.txt", "new\nline.txt", "Readme.md"]
    assert not kept & set(left_out)
    assert "README.md" in kept
    for name in left_out:
        assert sum(repr(name)[1:-1] in line for line in caplog.messages) == 1, "said once, not with every save"
    assert not any(path.read_bytes() == b"private" for path in target.rglob("*") if path.is_file())
    load(target, again)


def test_a_state_too_large_to_be_read_back_is_refused_before_it_is_written(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hosted = trained(llama)
    for limit in ("STATE_BYTES", "STATE_VALUES"):
        with monkeypatch.context() as patch:
            patch.setattr(writer, limit, getattr(writer, limit.replace("STATE", "JSON")) + 100)
            with pytest.raises(UserError, match="keep large tensors in files of your own"):
                save(hosted, tmp_path / "ckpt", llama, extra={"numbers": list(range(200))})
    assert not (tmp_path / "ckpt").exists()


def test_files_in_deeper_folders_are_written(tmp_path: Path):
    with FolderWriter(tmp_path / "made") as folder:
        folder.write_bytes("a/b/c.txt", b"x")
        for name in ("../out.txt", "/out.txt", "a/../../out.txt"):
            with pytest.raises(UserError, match="names"):
                folder.write_bytes(name, b"x")
        folder.commit({"format": "megatrain-checkpoint", "version": 1, "step": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert "a/b/c.txt" in read_manifest(tmp_path / "made").files


def test_model_from_memory(tmp_path: Path):
    model = build(BY_NAME["mixtral"], seed=0)
    model.generation_config.eos_token_id = 7
    hosted = host(build_from_memory(model, compute_dtype=torch.bfloat16), split=True)
    hosted.randomise(3)
    target = save(hosted, tmp_path / "ckpt", None)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert loaded.generation_config.eos_token_id == 7
    config = AutoConfig.from_pretrained(target)
    assert (config.dtype, config.architectures) == (torch.bfloat16, ["MixtralForCausalLM"])
    again = host(build_from_memory(model, compute_dtype=torch.bfloat16), split=True)
    load(target, again)
    assert_same_state(hosted, again)


def test_state_of_all_kinds_comes_back(llama: Path, tmp_path: Path):
    generator = torch.Generator().manual_seed(3)
    state = {
        "step": 5, "loss_scale": {"scale": 65536.0, "good": 3}, "worst": float("nan"), "best": float("inf"),
        "rng": {"torch": generator.get_state(), "python": (3, (1, 2, 2**40), None)}, "raw": b"\x00\xff", "name": "日本",
        "extra": {"data": [1, {"x": True}], "empty": torch.zeros(0, 3)},
    }  # fmt: skip
    hosted = trained(llama)
    target = save(hosted, tmp_path / "ckpt", llama, **state)
    back = load(target, hosted)
    assert str(back.pop("worst")) == "nan"
    state.pop("worst")
    assert torch.equal(back["rng"].pop("torch"), state["rng"].pop("torch"))
    assert back["extra"].pop("empty").shape == state["extra"].pop("empty").shape
    assert back == {"updates": 0, "seed": 0, **state}
    with pytest.raises(TypeError, match=r"state\.extra\[1\]: object"):
        save(hosted, tmp_path / "other", llama, extra=[0, object()])
    assert not (tmp_path / "other").exists()


def test_five_steps_equal_two_saved_and_three_resumed(llama: Path, tmp_path: Path):
    """AdamW on the masters continues bit for bit."""

    def step(hosted: Hosted, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for unit in hosted.structure.units:
            planes = hosted.store.units[unit.name]
            for entry in unit.layout.entries:
                gradient = torch.randn(entry.shape, generator=generator)
                m, v = (unit.layout.view(flat, entry.name) for flat in planes.states.values())
                m.lerp_(gradient, 0.1)
                v.lerp_(gradient.square(), 0.001)
                planes.write_master(entry.name, planes.read_master(entry.name) - 1e-3 * m / (v.sqrt() + 1e-8))

    straight, first, resumed = trained(llama), trained(llama), host_folder(llama)
    for number in range(5):
        step(straight, number)
    for number in range(2):
        step(first, number)
    save(first, tmp_path / "ckpt", llama)
    load(tmp_path / "ckpt", resumed)
    for number in range(2, 5):
        step(resumed, number)
    assert_same_state(straight, resumed)


def test_peak_memory_is_one_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By count: for each unit, weights and rest are views of the planes, and nothing else is allocated."""
    save_family("llama", tmp_path / "source")
    hosted = trained(tmp_path / "source")
    owned = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in hosted.planes().values()]
    copied: list[int] = []
    write = writer.FolderWriter.write_tensors

    def spying(self, name, tensors):
        views = [t for t in tensors.values() if any(a <= t.data_ptr() < b for a, b in owned) or not t.numel()]
        copied.append(sum(t.numel() * t.element_size() for t in tensors.values()) - sum(t.nbytes for t in views))
        write(self, name, tensors)

    monkeypatch.setattr(writer.FolderWriter, "write_tensors", spying)
    save(hosted, tmp_path / "ckpt", tmp_path / "source")
    assert len(copied) == 2 * len(hosted.structure.units)
    assert not any(copied), "split planes of a family without conversion are written without a copy"

    save_family("mixtral", tmp_path / "moe")
    hosted = trained(tmp_path / "moe")
    owned = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in hosted.planes().values()]
    copied.clear()
    save(hosted, tmp_path / "ckpt_moe", tmp_path / "moe")
    assert max(copied) <= 2 * max(unit.layout.param_count for unit in hosted.structure.units)


def test_memory_is_flat_over_twenty_saves(llama: Path, tmp_path: Path):
    """A save leaves nothing behind."""
    hosted = trained(llama)
    save(hosted, tmp_path / "warm", llama)
    tracemalloc.start()
    try:
        sizes = []
        for number in range(20):
            save(hosted, tmp_path / f"ckpt{number}", llama)
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[-1] - sizes[4] < 100_000, sizes


def test_existing_folder_is_never_overwritten(llama: Path, tmp_path: Path):
    hosted = trained(llama)
    target = save(hosted, tmp_path / "ckpt", llama)
    before = (target / MANIFEST_FILE).read_bytes()
    with pytest.raises(UserError, match="exists already"):
        save(hosted, target, llama)
    assert (target / MANIFEST_FILE).read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        save(hosted, tmp_path / "mine", llama)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    save(hosted, tmp_path / "empty", llama)
    assert is_complete(tmp_path / "empty")


def test_latest_complete_sees_only_complete_ones(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    runs = tmp_path / "checkpoints"
    assert latest_complete(runs) is None
    hosted = trained(llama)
    for step in (9, 10, 11, 12, 13):
        save(hosted, runs / f"step_{step}", llama, step=step)
    (runs / "step_13").rename(runs / "step_13.tmp-77")
    (runs / "step_12" / MANIFEST_FILE).unlink()
    next((runs / "step_11").glob("state/*")).unlink()
    (runs / "latest").write_text("step_13")
    with caplog.at_level(logging.WARNING, "megatrain"):
        assert latest_complete(runs) == runs / "step_10", "by number, not by name"
    assert "step_13.tmp-77: it was never finished" in caplog.text
    assert "step_12: is not a complete checkpoint: it has no manifest.json" in caplog.text
    assert "the file is missing" in caplog.text
    with pytest.raises(UserError, match="no manifest"):
        load(runs / "step_12", hosted)


def test_another_models_checkpoint_is_refused_before_anything_is_read(llama: Path, tmp_path: Path):
    target = save(trained(llama), tmp_path / "ckpt", llama)
    save_family("qwen3", tmp_path / "qwen3")
    other = trained(tmp_path / "qwen3")
    before = {key: tensor.clone() for key, tensor in other.planes().items()}
    with pytest.raises(UserError, match=r"another model: it lacks .*q_norm"):
        load(target, other)
    assert all(torch.equal(as_bits(before[key]), as_bits(tensor)) for key, tensor in other.planes().items())


def test_an_inexact_conversion_is_found(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = save(trained(llama), tmp_path / "ckpt", llama)
    to_model = reader.Conversion.to_model

    def wrong(self, tensors):
        name = "model.layers.0.mlp.up_proj.weight"
        return {key: t.flip(0) if key == name else t for key, t in to_model(self, tensors).items()}

    monkeypatch.setattr(reader.Conversion, "to_model", wrong)
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj\.weight differs from what was trained"):
        load(target, host_folder(llama))


@pytest.mark.parametrize("name", ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_a_config_with_infinities_is_read_back(name: str, tmp_path: Path) -> None:
    config = build(BY_NAME[name], seed=0).config
    config.save_pretrained(tmp_path)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    refuse_other_config(tmp_path, config)
    config.hidden_size += 8
    with pytest.raises(UserError, match="hidden_size"):
        refuse_other_config(tmp_path, config)

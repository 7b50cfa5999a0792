"""Weights from a folder to the planes and back: names, shapes, dtypes and values as transformers reads and writes them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hosted import host_folder, save_family
from megatrain.errors import UserError
from megatrain.models import weights
from megatrain.models.conversion import to_checkpoint, unit_of_names
from megatrain.models.weights import check_weights, find_weight_files, load_weights

# Fused experts (stacked, interleaved, transposed), renamed prefixes, split and merged projections, linear attention.
ROUND_TRIP = [
    "llama", "gpt2", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "ernie4_5_moe", "jamba",
    "phimoe", "minimax", "nemotron_h", "qwen3_next", "lfm2_moe", "granitemoe", "jetmoe", "bloom", "mamba2",
]  # fmt: skip


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_planes_equal_from_pretrained_and_convert_back(name: str, tmp_path: Path):
    save_family(name, tmp_path)
    hosted = host_folder(tmp_path)
    check_weights(tmp_path, hosted.structure)
    load_weights(tmp_path, hosted.structure, hosted.store, hosted.buffers)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    want = dict(plain.named_parameters())
    masters = hosted.masters()
    assert masters.keys() == want.keys()
    assert all(torch.equal(masters[key], want[key]) for key in want), "an fp32 source is exact under bf16 compute"
    for key, buffer in hosted.buffers.items():
        assert torch.equal(buffer, plain.state_dict()[key].to(buffer.dtype)), key
    assert all(p.is_meta for p in hosted.structure.model.parameters())

    back: dict[str, torch.Tensor] = {}
    owner, model = unit_of_names(hosted.structure), hosted.structure.model
    assert isinstance(model, PreTrainedModel)
    for unit in hosted.structure.units:
        tensors = masters | hosted.buffers
        part = to_checkpoint(model, {name: tensors[name] for name in tensors if owner[name] == unit.name})
        assert not back.keys() & part.keys()
        back |= part
    source = read_all(tmp_path)
    assert back.keys() == source.keys()
    for key, tensor in source.items():
        assert back[key].shape == tensor.shape, key
        assert torch.equal(back[key].float(), tensor.to(back[key].dtype).float()), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("split", [True, False])
def test_no_source_dtype_is_rounded(dtype: torch.dtype, split: bool, tmp_path: Path):
    save_family("llama", tmp_path, dtype=dtype)
    hosted = host_folder(tmp_path, split)
    load_weights(tmp_path, hosted.structure, hosted.store, hosted.buffers)
    source = read_all(tmp_path)
    assert all(torch.equal(master, source[key].float()) for key, master in hosted.masters().items())


def test_one_file_shards_and_loose_files_give_the_same_weights(tmp_path: Path):
    model = save_family("qwen3_moe", tmp_path / "one")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert (tmp_path / "sharded" / weights.INDEX_FILE).is_file()
    loose = tmp_path / "loose"
    loose.mkdir()
    tensors = sorted(read_all(tmp_path / "one").items())
    for part in range(3):
        save_file(dict(tensors[part::3]), loose / f"part{part}.safetensors")
    masters = []
    for folder in ("one", "sharded", "loose"):
        hosted = host_folder(tmp_path / "one")
        load_weights(tmp_path / folder, hosted.structure, hosted.store, hosted.buffers)
        masters.append(hosted.masters())
    for other in masters[1:]:
        assert all(torch.equal(other[key], masters[0][key]) for key in masters[0])


def test_a_tied_weight_may_have_either_name_or_both(tmp_path: Path):
    save_family("llama", tmp_path, tie=True)
    source = load_file(tmp_path / "model.safetensors")
    embedding = source.pop("model.embed_tokens.weight")
    for names in (["model.embed_tokens.weight"], ["lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]):
        save_file(source | {name: embedding.clone() for name in names}, tmp_path / "model.safetensors")
        hosted = host_folder(tmp_path)
        load_weights(tmp_path, hosted.structure, hosted.store, hosted.buffers)
        assert torch.equal(hosted.masters()["model.embed_tokens.weight"], embedding)
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1}
    save_file(source | both, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="tied by the config but differ"):
        load_weights(tmp_path, hosted.structure, hosted.store, hosted.buffers)


def test_files_of_a_base_model_have_names_without_prefix(tmp_path: Path):
    model = save_family("llama", tmp_path, tie=True)
    model.model.save_pretrained(tmp_path / "base")
    model.config.save_pretrained(tmp_path / "base")
    assert "embed_tokens.weight" in find_weight_files(tmp_path / "base")
    hosted = host_folder(tmp_path)
    load_weights(tmp_path / "base", hosted.structure, hosted.store, hosted.buffers)
    want = dict(model.named_parameters())
    assert all(torch.equal(master, want[key]) for key, master in hosted.masters().items())


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(DOWN), f"1 tensor missing: {DOWN}"),
        (lambda t: t.update({DOWN: t[DOWN][:-1].contiguous()}), r"has shape \(63, 96\).*makes it \(64, 96\)"),
        (lambda t: t.update({DOWN: t[DOWN].to(torch.float8_e4m3fn)}), f"{DOWN} has dtype torch.float8_e4m3fn"),
        (lambda t: t.update({DOWN: t[DOWN].double()}), f"{DOWN} has dtype torch.float64"),
    ],
    ids=["missing", "shape", "fp8", "fp64"],
)
def test_refused_tensors(change, says: str, tmp_path: Path):
    save_family("llama", tmp_path)
    edit(tmp_path, change)
    hosted = host_folder(tmp_path)
    for read in (
        lambda: load_weights(tmp_path, hosted.structure, hosted.store, hosted.buffers),
        lambda: check_weights(tmp_path, hosted.structure),  # from the headers alone
    ):
        with pytest.raises(UserError, match=says) as caught:
            read()
        assert str(tmp_path) in str(caught.value)
        assert all(p.is_meta for p in hosted.structure.model.parameters())
        assert ("dequantize" in str(caught.value)) == ("float8" in says)


def test_headers_are_checked_without_reading_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_family("qwen3_moe", tmp_path)
    hosted = host_folder(tmp_path)
    monkeypatch.setattr(weights, "_map_tensors", lambda *_: pytest.fail("a value was read"))
    check_weights(tmp_path, hosted.structure)


def test_headers_of_tied_models_and_of_base_models(tmp_path: Path):
    """All names that tied tensors, and tensors of a model without its prefix, may have in the files."""
    model = save_family("llama", tmp_path, tie=True)
    hosted = host_folder(tmp_path)
    source = load_file(tmp_path / "model.safetensors")
    embedding = source.pop("model.embed_tokens.weight")
    for names in (["model.embed_tokens.weight"], ["lm_head.weight"], ["model.embed_tokens.weight", "lm_head.weight"]):
        save_file(source | {name: embedding.clone() for name in names}, tmp_path / "model.safetensors")
        check_weights(tmp_path, hosted.structure)
    save_file(source, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"1 tensor missing: model\.embed_tokens\.weight"):
        check_weights(tmp_path, hosted.structure)
    model.model.save_pretrained(tmp_path / "base")
    check_weights(tmp_path / "base", hosted.structure)


def test_unexpected_tensors_are_logged_except_for_harmless_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_family("llama", tmp_path)
    edit(tmp_path, lambda t: t.update({"model.layers.0.rotary_emb.inv_freq": torch.ones(4)}))
    hosted = host_folder(tmp_path)
    with caplog.at_level(logging.WARNING, "megatrain"):
        load_weights(tmp_path, hosted.structure, hosted.store, hosted.buffers)
        assert not caplog.records
        edit(tmp_path, lambda t: t.update({"vision.proj.weight": torch.ones(4)}))
        load_weights(tmp_path, hosted.structure, hosted.store, hosted.buffers)
    assert "1 tensor not used: vision.proj.weight" in caplog.text


def test_a_missing_buffer_keeps_its_initial_value_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_family("minimax", tmp_path)
    name = "model.layers.1.self_attn.slope_rate"
    hosted = host_folder(tmp_path)
    if name not in hosted.buffers:
        name = next(key for key in hosted.buffers if key.endswith("slope_rate"))
    load_weights(tmp_path, hosted.structure, hosted.store, hosted.buffers)
    want = hosted.buffers[name].clone()
    edit(tmp_path, lambda t: t.pop(name))
    hosted = host_folder(tmp_path)
    with caplog.at_level(logging.WARNING, "megatrain"):
        load_weights(tmp_path, hosted.structure, hosted.store, hosted.buffers)
    assert name in caplog.text
    assert torch.equal(hosted.buffers[name], want)


def test_refused_folders(tmp_path: Path):
    with pytest.raises(UserError, match="holds no weights"):
        find_weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match=r"not safetensors \(pytorch_model\.bin\)"):
        find_weight_files(tmp_path)
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match=r"b\.safetensors: tensor x is also in a\.safetensors"):
        find_weight_files(tmp_path)


def test_damaged_shards_are_named(tmp_path: Path):
    save_family("llama", tmp_path / "x").save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / weights.INDEX_FILE).read_text())
    shard = tmp_path / sorted(set(index["weight_map"].values()))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=f"{shard.name}: corrupt or truncated"):
        find_weight_files(tmp_path)
    shard.unlink()
    with pytest.raises(UserError, match=f"shard {shard.name} is missing"):
        find_weight_files(tmp_path)
    save_file({"other": torch.ones(1)}, shard)
    with pytest.raises(UserError, match="should be in this shard according to model"):
        find_weight_files(tmp_path)
    (tmp_path / weights.INDEX_FILE).write_text("[1]")
    with pytest.raises(UserError, match="not a safetensors index"):
        find_weight_files(tmp_path)


def test_only_one_unit_is_real_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each conversion returns one unit, and leaves nothing in the model."""
    save_family("qwen3_moe", tmp_path)
    hosted = host_folder(tmp_path)
    sizes: list[int] = []
    resolve = weights.resolve_ties

    def spying(structure, found, where):
        assert all(p.is_meta for p in structure.model.parameters())
        sizes.append(sum(tensor.numel() for tensor in found.values()))
        return resolve(structure, found, where)

    monkeypatch.setattr(weights, "resolve_ties", spying)
    load_weights(tmp_path, hosted.structure, hosted.store, hosted.buffers)
    assert sizes == [unit.layout.param_count for unit in hosted.structure.units]

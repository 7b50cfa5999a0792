"""`export` writes a plain folder that computes the same, and `verify` names every damaged file and tensor."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hosted import Hosted, save, save_as, save_family, trained
from megatrain.checkpoint import card
from megatrain.checkpoint import export as module
from megatrain.checkpoint.export import export, find_checkpoint, verify
from megatrain.checkpoint.format import canonical
from megatrain.commands.main import main
from megatrain.config.load import dump_config, load_config
from megatrain.errors import UserError
from megatrain.metrics.record import MetricsWriter
from step_records import record


def checkpoint(family: str, tmp_path: Path, dtype: torch.dtype = torch.float32) -> tuple[Hosted, Path, Path]:
    """(state, source folder, a run with one checkpoint of it)."""
    source = tmp_path / "source"
    save_family(family, source, dtype=dtype)
    for name, text in {
        "tokenizer.json": "{}",
        "chat_template.jinja": "x",
        "README.md": "---\nlicense: mit\n---\n",
    }.items():
        (source / name).write_text(text)
    hosted = trained(source)
    run = tmp_path / "run"
    save(hosted, run / "checkpoints" / "step_000007", source, step=7)
    return hosted, source, run


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3", "gpt_oss"])
def test_export_has_the_sources_keys_shapes_and_type(family: str, tmp_path: Path) -> None:
    hosted, source, run = checkpoint(family, tmp_path)
    out = export(run, tmp_path / "out")
    mine, theirs = tensors(out), tensors(source)
    assert {k: (t.shape, t.dtype) for k, t in mine.items()} == {k: (t.shape, t.dtype) for k, t in theirs.items()}
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(loaded[name], master) for name, master in hosted.masters().items()), (
        "fp32: the exact masters"
    )
    assert {p.name for p in out.iterdir() if p.suffix != ".safetensors"} == {
        "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja",
        "README.md", "README.source.md",
    }  # fmt: skip
    assert [p.name for p in out.glob("*.safetensors")] == ["model.safetensors"], "a small model is one file"
    text = (out / "README.md").read_text()
    assert text.startswith("---\n")
    for words in ("license: mit", "library_name: transformers", "| optimizer steps | 7 |", "| weights | float32 |"):
        assert words in text


def test_an_export_takes_no_adapter_no_code_and_no_link_of_the_runs_folder_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of an earlier version, or of somebody else, may list them."""
    _, _, run = checkpoint("llama", tmp_path)
    (tmp_path / "private.png").write_bytes(b"private")
    (run / "config.yaml").write_text("of another version: true\n")
    (run / "loss.png").symlink_to("../private.png")
    (run / "metrics.jsonl").symlink_to("/dev/zero")
    given = run / "checkpoints" / "step_000007"
    manifest = json.loads((given / "manifest.json").read_text())
    manifest.pop("crc32")
    for name in ("adapter_config.json", "modeling_odd.py", "pytorch_model.bin", "notes.txt"):
        (given / name).write_bytes(b"{}")
        manifest["files"][name] = {"size": 2, "crc32": zlib.crc32(b"{}")}
    (given / "manifest.json").write_text(json.dumps(manifest | {"crc32": zlib.crc32(canonical(manifest))}))
    with caplog.at_level("WARNING", "megatrain"):
        out = export(run, tmp_path / "out")
    assert {path.name for path in out.iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md", "README.source.md",
        "model.safetensors", "notes.txt",
    }  # fmt: skip
    assert "adapter_config.json' is not copied" in caplog.text


def test_the_card_of_a_run_says_how_the_model_was_trained(tmp_path: Path) -> None:
    _, _, run = checkpoint("llama", tmp_path)
    settings = {
        "model": {"path": "source"},
        "data": {"train": ["a.jsonl", {"path": "b/", "weight": 0.5}], "max_tokens": 64, "val": {"fraction": 0.05}},
        "batch": {"tokens_per_step": 64},
        "run": {"dir": str(run)},
    }
    (run / "config.yaml").write_text(dump_config(load_config(settings)))
    (run / "loss.png").write_bytes(b"a picture")
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        for step in range(1, 9):
            metrics.write(record(step, loss=5.0 - step / 4, val_loss=2.0 if step == 6 else None))
    out = export(run, tmp_path / "out")
    text = (out / "README.md").read_text()
    assert (out / "loss.png").read_bytes() == b"a picture"
    for words in (
        "# run\n", "](loss.png)", "- `a.jsonl`\n- `b/`, weight 0.5\n- held out: 5.00% of the above",
        "## Config\n\n```yaml\nmodel:\n  path: source\n", "| trained tokens | 21,000 |",
        "| training loss, first and last step | 4.7500, 3.2500 |",
        "| validation loss | 2.0000 |", f"torch {torch.__version__}, transformers",
    ):  # fmt: skip
        assert words in text, words
    (run / "config.yaml").write_text("of another version: true\n")
    (run / "metrics.jsonl").write_text("damaged\nlines\n")
    (run / "loss.png").unlink()
    assert "## Data" not in (export(run, tmp_path / "less") / "README.md").read_text()


@pytest.mark.parametrize(
    ("model", "base"),
    [
        ({"path": "org/name"}, "org/name"),
        ({"path": "org/name", "init": "random"}, None),
        ({"path": "org/gone"}, None),  # the path of a folder that is gone looks the same
        ({"path": "/cache/models--org--na-me/snapshots/0f1"}, "org/na-me"),
        ({"path": "models/mine"}, None),
    ],
)
def test_the_card_names_the_model_that_training_started_from(
    model: dict[str, str], base: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "cached_snapshot", lambda name: tmp_path if name in ("org/name", "models/mine") else None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    run = load_config(
        {
            "model": model,
            "data": {"train": "a", "max_tokens": 8},
            "batch": {"tokens_per_step": 8},
            "run": {"dir": "r"},
        }
    )
    step = tmp_path / "checkpoints" / "step_000007"
    step.mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(dump_config(run))
    (tmp_path / "metrics.jsonl").touch()
    (step / "README.md").write_text("---\nlicense: [unclosed\n---\n")
    extra = {"model": model["path"], "settings": {"precision.compute_dtype": "auto"}, "computed_in": "bfloat16"}
    text = card.card_text(step, extra, 7, {}, torch.bfloat16)
    assert [line for line in text.splitlines() if line.startswith("base_model")] == (
        [f"base_model: {base}"] if base else []
    )
    assert "| precision.compute_dtype | bfloat16 |" in text
    assert "license" not in text.split("---")[1], "the source's metadata cannot be read"


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_export_in_another_type(word: str, dtype: torch.dtype, tmp_path: Path) -> None:
    hosted, _, run = checkpoint("llama", tmp_path)
    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", word]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == dtype
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    size = sum(t.numel() * t.element_size() for t in tensors(tmp_path / "out").values())
    assert size == 2 * hosted.structure.param_count, "not doubled"
    for name, master in hosted.masters().items():
        assert (loaded.state_dict()[name].float() - master).abs().max() <= master.abs().max() * torch.finfo(dtype).eps


def test_a_bf16_source_is_exported_as_bf16(tmp_path: Path) -> None:
    _, _, run = checkpoint("llama", tmp_path, torch.bfloat16)
    assert {t.dtype for t in tensors(export(run, tmp_path / "out")).values()} == {torch.bfloat16}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_a_large_model_is_split_into_shards(family: str, tmp_path: Path) -> None:
    """A unit may be in several shards, and a shard may hold two dtypes; index and tensors equal those of the single file."""
    _, source, run = checkpoint(family, tmp_path)
    limit = max(t.numel() * 2 for t in tensors(source).values()) * 2
    words = ["--dtype=bf16", f"--max-shard-size={limit / 1000}KB"]
    assert main(["export", str(run), str(tmp_path / "out"), *words]) == 0
    whole = export(run, tmp_path / "whole", dtype="bf16")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        inside = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in inside)
        assert sum(t.numel() * t.element_size() for t in inside.values()) <= limit
    one, many = tensors(whole), tensors(tmp_path / "out")
    assert index["weight_map"].keys() == one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in one.values())


@pytest.mark.parametrize("word", ["5", "GB", "-1GB", "5 gigabytes", "0MB", "nanGB"])
def test_an_invalid_shard_size_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "run", "out", f"--max-shard-size={word}"])
    assert "should be a size like 5GB" in capsys.readouterr().err


def test_an_export_that_computes_something_else_is_refused_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, run = checkpoint("llama", tmp_path)
    real = module.with_dtype

    def other_config(config: dict, dtype: str) -> dict:
        return real(config, dtype) | {"rms_norm_eps": 0.5}

    with monkeypatch.context() as patch:
        patch.setattr(module, "with_dtype", other_config)
        with pytest.raises(UserError, match="computes other logits"):
            export(run, tmp_path / "out")
    with monkeypatch.context() as patch:
        convert = module.to_checkpoint
        half = lambda model, parts: {k: t * 0.5 for k, t in convert(model, parts).items()}  # noqa: E731
        patch.setattr(module, "to_checkpoint", half)
        with pytest.raises(UserError, match="is not what was trained"):
            export(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "source"], "nothing is left"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(UserError, match="exists already"):
        export(run, tmp_path / "out")


def test_verify_names_every_damaged_file_and_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, run = checkpoint("llama", tmp_path)
    folder = find_checkpoint(run)
    assert main(["verify", str(run)]) == 0
    assert "all checksums are right" in capsys.readouterr().out
    damaged = sorted(folder.glob("state/*"))[0]
    raw = bytearray(damaged.read_bytes())
    raw[-1] ^= 1
    damaged.write_bytes(bytes(raw))
    (folder / "tokenizer.json").write_text("}{")
    (folder / "generation_config.json").unlink()
    assert main(["verify", str(folder)]) == 2
    text = capsys.readouterr().err
    assert "3 of" in text
    for words in (f"{damaged}: the checkpoint is damaged: tensor ", "tokenizer.json: ", "generation_config.json: "):
        assert words in text
    with pytest.raises(UserError, match="damaged"):
        export(folder, tmp_path / "out")
    assert main(["verify", str(tmp_path / "nowhere")]) == 2


def test_weights_only_is_a_model_folder_of_two_bytes_a_parameter(tmp_path: Path) -> None:
    hosted, source, _ = checkpoint("llama", tmp_path)
    save_as(hosted, tmp_path / "weights", {"step": 3}, source, weights_only=True)
    assert not (tmp_path / "weights" / "state").exists()
    assert verify(tmp_path / "weights") < 2.3 * hosted.structure.param_count + 20_000
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights").state_dict()
    for unit in hosted.structure.units:
        for local, full in unit.full_names():
            assert torch.equal(loaded[full], unit.layout.view(hosted.store.units[unit.name].hi, local))
    with pytest.raises(UserError, match="weights only"):
        export(tmp_path / "weights", tmp_path / "out")


def test_names_in_a_card_are_text_and_nothing_else(tmp_path: Path) -> None:
    """A run's name and the data's paths make no heading, link, HTML, cell or end of a code block."""
    folder = tmp_path / "run [a](http:x) <b> | c"
    text = {"name": "x", "data": {"max_tokens": "<script> | [b](c) `d`"}}
    run = card.RunFiles(folder.name, load_config(_config_of(tmp_path, "a`\n# heading\n```\n<script>.jsonl")), [], None)
    page = "\n".join([card._table(card._facts(text, 3, {}, torch.float32, run)), card._data(run.config)])  # type: ignore[arg-type]
    assert r"| tokens per row | \<script> \| \[b](c) \`d\` |" in page
    assert r"- `a'\n# heading\n'''\n<script>.jsonl`" in page
    assert [line for line in page.splitlines() if line.startswith(("#", "```", "<"))] == []
    assert card._plain(folder.name) == r"run \[a](http:x) \<b> \| c"


def _config_of(tmp_path: Path, data: str) -> dict[str, object]:
    return {
        "model": {"path": str(tmp_path)},
        "data": {"train": data},
        "batch": {"tokens_per_step": 2048},
        "run": {"dir": str(tmp_path)},
    }

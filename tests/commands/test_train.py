"""The real command line on a tiny Llama: files of a run, resuming, stopping, and refusals."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.commands.main import main
from megatrain.config.load import load_config
from megatrain.metrics.record import read_records
from megatrain.run import saves
from tiny_run import config, prepare, write_chats, write_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("files"))
    write_chats(folder / "chats.jsonl", 40)
    YAML().dump(config(folder), folder / "run.yaml")
    return folder


def numbers(folder: Path) -> list[tuple[object, ...]]:
    return [
        (r.step, r.epoch, r.loss, r.grad_norm, r.learning_rate, r.trained_tokens, r.processed_tokens, r.val_loss)
        for r in read_records(folder / "metrics.jsonl")
    ]


def run(files: Path, folder: Path, command: str, *words: str) -> int:
    return main([command, str(files / "run.yaml"), "--run.dir", str(folder / "run"), *words])


def test_train_writes_a_model_that_transformers_loads(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--schedule.steps=12", "--optim.learning_rate=3e-3", "--data.val={fraction: 0.2}", "--eval.at_start"]
    assert run(files, tmp_path, "train", *words) == 0
    folder = tmp_path / "run"
    assert {p.name for p in folder.iterdir()} == {"config.yaml", "metrics.jsonl", "log.txt", "loss.png", "checkpoints"}
    assert load_config(folder / "config.yaml").schedule.steps == 12
    found = read_records(folder / "metrics.jsonl")
    assert [record.step for record in found] == list(range(13))
    first, last = found[1].loss, found[-1].loss
    assert first is not None
    assert last is not None
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoints" / "step_000012")
    assert first == pytest.approx(math.log(len(tokenizer)), abs=0.3)
    assert last < first - 0.2
    assert found[-1].val_loss < found[0].val_loss  # type: ignore[operator]

    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert sum(line.startswith("step ") and " loss " in line for line in lines) >= 12
    assert "Writing model" not in shown.err
    assert shown.err == ""

    checkpoint = folder / "checkpoints" / "step_000012"
    assert (folder / "checkpoints" / "latest").read_text() == "step_000012\n"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = tokenizer("the quick brown fox", return_tensors="pt").input_ids
    assert model(input_ids=ids, labels=ids).loss.item() < first

    # `eval` on the same samples, with the exact weights of the checkpoint
    capsys.readouterr()
    assert main(["eval", str(folder), "--checkpoint", str(checkpoint)]) == 0
    said = capsys.readouterr().out
    assert f"validation loss {found[-1].val_loss:.4f}" in said
    assert "trained model" not in said
    assert not [line for line in said.splitlines() if line.startswith("train:")], "of no use to an evaluation"
    # and with the initial model, which the YAML file names
    assert run(files, tmp_path, "eval", *words) == 0
    said = capsys.readouterr().out
    assert f"evaluating {files / 'model'}; for the trained model: megatrain eval {folder}\n" in said
    assert f"validation loss {found[0].val_loss:.4f}" in said


def test_a_resumed_run_equals_an_uninterrupted_one(files: Path, tmp_path: Path) -> None:
    words = ["--schedule.kind=cosine", "--schedule.warmup_steps=2", "--schedule.steps=12", "--checkpoint.every_steps=6"]
    words += ["--data.val={fraction: 0.2}", "--eval.every_steps=5", "--checkpoint.keep=null"]
    assert run(files, tmp_path / "whole", "train", *words) == 0
    shutil.copytree(tmp_path / "whole" / "run", tmp_path / "cut" / "run")
    cut = tmp_path / "cut" / "run"
    shutil.rmtree(cut / "checkpoints" / "step_000012")
    before = (cut / "metrics.jsonl").read_text().splitlines()
    assert run(files, tmp_path / "cut", "train", *words, "--resume", "auto") == 0
    assert (cut / "metrics.jsonl").read_text().splitlines()[:6] == before[:6]
    assert numbers(cut) == numbers(tmp_path / "whole" / "run")
    for name in ("model-00001-of-00004.safetensors", "state/layer.1.safetensors", "state/embedding.safetensors"):
        one, two = (folder / "checkpoints" / "step_000012" / name for folder in (cut, tmp_path / "whole" / "run"))
        assert one.read_bytes() == two.read_bytes(), name


def test_a_chat_run_trains_only_the_answers(files: Path, tmp_path: Path) -> None:
    assert run(files, tmp_path, "train", "--data.train", str(files / "chats.jsonl"), "--schedule.steps=2") == 0
    for record in read_records(tmp_path / "run" / "metrics.jsonl"):
        assert 0.3 < record.trained_tokens / record.processed_tokens < 0.7


def test_eval_reports_the_loss_of_each_source(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = f"[{files}/texts.jsonl, {files}/chats.jsonl]"
    assert run(files, tmp_path, "eval", "--data.train", sources, "--data.val={fraction: 0.3}") == 0
    out = capsys.readouterr().out
    found = re.findall(r"(\w+)\.jsonl: loss ([\d.]+), perplexity [\d.]+ over ([\d,]+) tokens", out)
    assert [name for name, _, _ in found] == ["texts", "chats"]
    total = re.search(r"validation loss ([\d.]+), perplexity [\d.]+ over ([\d,]+) tokens", out)
    assert total is not None
    tokens = [int(count.replace(",", "")) for _, _, count in found]
    assert sum(tokens) == int(total[2].replace(",", ""))
    mean = sum(float(loss) * count for (_, loss, _), count in zip(found, tokens, strict=True)) / sum(tokens)
    assert mean == pytest.approx(float(total[1]), abs=1e-3)


def test_sigterm_saves_and_exits_0_and_the_run_resumes_exactly(files: Path, tmp_path: Path) -> None:
    words = ["--schedule.steps=400", "--checkpoint.every_steps=null"]
    command = [
        sys.executable,
        "-m",
        "megatrain",
        "train",
        str(files / "run.yaml"),
        "--run.dir",
        str(tmp_path / "run"),
        *words,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or len(read_records(metrics)) >= 3)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, out + err
    assert "Traceback" not in err
    steps = len(read_records(metrics))
    assert 3 <= steps < 400
    assert (tmp_path / "run" / "checkpoints" / f"step_{steps:06d}" / "manifest.json").is_file()
    assert f"stopped by SIGTERM after step {steps} of 400" in out
    assert run(files, tmp_path, "train", f"--schedule.steps={steps + 3}", "--resume", "latest") == 0
    assert run(files, tmp_path / "whole", "train", f"--schedule.steps={steps + 3}") == 0
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole" / "run")


def test_two_signals_exit_130(files: Path, tmp_path: Path) -> None:
    words = ["train", str(files / "run.yaml"), "--run.dir", str(tmp_path / "run")]
    # the child signals itself while it reports a step: sent from here, both signals could arrive after the last step
    code = f"""
        import os, signal, sys
        from megatrain.commands.main import main
        from megatrain.metrics.logger import RunLogger

        def step(self, record, total_steps):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

        RunLogger.step = step
        sys.exit(main({words!r}))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith("interrupted; nothing was saved yet, start again with --resume auto\n")


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input: exit code 2, place and remedy, no traceback


Bad = namedtuple("Bad", "change code words")


def no_model(folder: Path) -> list[str]:
    return ["--model.path", str(folder / "modle")]


def model_without_config(folder: Path) -> list[str]:
    (folder / "model" / "config.json").unlink()
    return []


def model_without_weights(folder: Path) -> list[str]:
    (folder / "model" / "model.safetensors").unlink()
    return []


def torn_weights(folder: Path) -> list[str]:
    path = folder / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    return []


def missing_shard(folder: Path) -> list[str]:
    path = folder / "model" / "model.safetensors"
    path.unlink()
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    return []


def pickled_weights(folder: Path) -> list[str]:
    path = folder / "model" / "model.safetensors"
    path.rename(path.with_name("pytorch_model.bin"))
    return []


def encoder(folder: Path) -> list[str]:
    (folder / "model" / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    return []


def encoder_decoder(folder: Path) -> list[str]:
    (folder / "model" / "config.json").write_text('{"model_type": "t5"}')
    return []


def unknown_family(folder: Path) -> list[str]:
    (folder / "model" / "config.json").write_text('{"model_type": "lama"}')
    return []


def no_tokenizer(folder: Path) -> list[str]:
    for path in (folder / "model").glob("tokenizer*"):
        path.unlink()
    return []


def small_vocabulary(folder: Path) -> list[str]:
    shutil.rmtree(folder / "model")
    write_model(folder / "model", vocab_size=100)
    return []


def no_chat_template(folder: Path) -> list[str]:
    shutil.rmtree(folder / "model")
    write_model(folder / "model", chat_template=False)
    write_chats(folder / "chats.jsonl", 5)
    return ["--data.train", str(folder / "chats.jsonl")]


def no_data(folder: Path) -> list[str]:
    return ["--data.train", str(folder / "text.jsonl")]


def empty_data(folder: Path) -> list[str]:
    (folder / "texts.jsonl").write_text("")
    return []


def long_sample(folder: Path) -> list[str]:
    write_chats(folder / "chats.jsonl", 5)
    return ["--data.train", str(folder / "chats.jsonl"), "--data.max_tokens=16", "--batch.tokens_per_step=16"]


def positions(folder: Path) -> list[str]:
    return ["--data.max_tokens=512", "--batch.tokens_per_step=512"]


def unknown_key(folder: Path) -> list[str]:
    text = (folder / "run.yaml").read_text().replace("learning_rate", "learning_rte")
    (folder / "run.yaml").write_text(text)
    return []


def used_folder(folder: Path) -> list[str]:
    (folder / "run").mkdir()
    (folder / "run" / "notes.txt").touch()
    return []


def nothing_to_resume(folder: Path) -> list[str]:
    return ["--resume", "latest"]


def long_warm_up(folder: Path) -> list[str]:
    return ["--schedule.warmup_steps=4"]


def many_threads(folder: Path) -> list[str]:
    return ["--run.threads=99999"]


def mesh_settings(folder: Path) -> list[str]:
    return ["--parallel.tensor=2", "--parallel.schedule=zbv"]


def no_such_parameter(folder: Path) -> list[str]:
    return ["--optim.groups", "[{pattern: lora_A}]"]


def no_cuda(folder: Path) -> list[str]:
    return ["--run.device", "cuda"]


def no_host_memory(folder: Path) -> list[str]:
    return ["--memory.host_gib=0.0005"]


BAD = [
    Bad(no_model, 2, ["no such model folder", "did you mean"]),
    Bad(model_without_config, 2, ["no config.json"]),
    Bad(model_without_weights, 2, ["holds no weights", "init: random"]),
    Bad(torn_weights, 2, ["model.safetensors", "corrupt or truncated"]),
    Bad(missing_shard, 2, ["model-00001-of-00002.safetensors is missing"]),
    Bad(pickled_weights, 2, ["not safetensors", "pytorch_model.bin"]),
    Bad(encoder, 2, ["'bert'", "decoder-only"]),
    Bad(encoder_decoder, 2, ["encoder-decoder", "decoder-only"]),
    Bad(unknown_family, 2, ["'lama' is unknown", "did you mean"]),
    Bad(no_tokenizer, 2, ["has no usable tokenizer"]),
    Bad(small_vocabulary, 2, ["outside the model's vocabulary of 100", "texts.jsonl:"]),
    Bad(no_chat_template, 2, ["chat template"]),
    Bad(no_data, 2, ["text.jsonl", "data.train[0].path"]),
    Bad(empty_data, 2, ["texts.jsonl", "no samples"]),
    Bad(long_sample, 2, ["longer than 16 tokens", "chats.jsonl:", "overflow"]),
    Bad(positions, 2, ["256 positions", "data.max_tokens"]),
    Bad(unknown_key, 2, ["run.yaml:", "optim.learning_rte: unknown key", 'did you mean "optim.learning_rate"']),
    Bad(used_folder, 2, ["is not empty", "--resume auto"]),
    Bad(nothing_to_resume, 2, ["no complete checkpoint"]),
    Bad(long_warm_up, 2, ["a warm-up of 4 steps does not fit into a run of 4"]),
    Bad(many_threads, 2, ["run.threads: 99999 threads are more than"]),
    Bad(
        mesh_settings,
        2,
        ["parallel.tensor: is a setting of the mesh engine", "parallel.schedule: is a", "engine: mesh"],
    ),
    Bad(no_such_parameter, 2, ["no parameter matches", "lora_A"]),
    Bad(no_host_memory, 3, ["not enough host memory", "memory.host_gib: 0.0005", "how to reduce it"]),
    pytest.param(
        Bad(no_cuda, 2, ["no CUDA device"]), marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
    ),
]


@pytest.fixture
def own_files(files: Path, tmp_path: Path) -> Path:
    """Files with their config, for tests that break them."""
    shutil.copytree(files / "model", tmp_path / "model")
    shutil.copy(files / "texts.jsonl", tmp_path)
    YAML().dump(config(tmp_path), tmp_path / "run.yaml")
    return tmp_path


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.change.__name__)
def test_bad_input_is_refused_with_place_and_remedy(
    own_files: Path, capsys: pytest.CaptureFixture[str], bad: Bad
) -> None:
    words = bad.change(own_files)
    before = {path for path in own_files.rglob("*") if "cache" not in path.parts}
    for command in ("check", "train"):
        assert main([command, str(own_files / "run.yaml"), *words]) == bad.code
        text = capsys.readouterr().err
        assert text.startswith("error: ")
        assert "Traceback" not in text
        for word in bad.words:
            assert word in text, text
    assert {path for path in own_files.rglob("*") if "cache" not in path.parts} == before


def test_no_space_for_the_checkpoints(
    own_files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(own_files)
    monkeypatch.setattr(saves.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    assert main(["train", str(own_files / "run.yaml")]) == 2
    assert "not enough space for 1 checkpoint of" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train"], ["plan"], ["verify"], ["plot"], ["monitor"]], ids=str)
def test_system_errors_give_no_traceback(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "x" * 300]) == 2
    assert re.search(r"error: x+(/\S+)?: File name too long\n  -> check the path", capsys.readouterr().err)


@pytest.mark.parametrize("key", ["model.path", "data.train", "data.cache_dir", "run.dir"])
def test_system_errors_on_config_paths_give_no_traceback(
    key: str, own_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(own_files / "run.yaml"), f"--{key}={'x' * 300}"]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_all_problems_are_reported_at_once(own_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used_folder(own_files)
    words = [*no_model(own_files), *no_data(own_files), *long_warm_up(own_files)]
    assert main(["check", str(own_files / "run.yaml"), *words]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: 4 problems")
    for word in ("is not empty", "no such model folder", "text.jsonl", "a warm-up of 4"):
        assert word in text


@pytest.mark.parametrize("command", ["check", "train", "data"])
def test_cheap_checks_run_before_slow_work(
    command: str, own_files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong path is reported before tokenizing and before the model is checked."""
    for slow in ("data.load.open_data", "models.build.build_meta_model", "engine.parity_check.verify_family"):
        monkeypatch.setattr(f"megatrain.{slow}", lambda *_, slow=slow, **__: pytest.fail(f"{slow} was started"))
    (own_files / "a file").touch()
    words = {
        "--data.train": f"[{own_files}/texts.jsonl, {own_files}/text.jsonl]",
        "--data.val": f"{own_files}/held-out.jsonl",
        "--data.chat_template": str(own_files / "model"),
        "--data.cache_dir": str(own_files / "a file" / "cache"),
    }
    said = ["data.train[1].path", "data.val.sources[0].path", "model is a folder", "a file: is a file, not a folder"]
    if command != "data":
        used_folder(own_files)
        words |= {"--schedule.warmup_steps": "9", "--run.device": "cuda"}
        said += ["is not empty", "a warm-up of 9 steps", "no CUDA device"][: 2 if torch.cuda.is_available() else 3]
    assert main([command, str(own_files / "run.yaml"), *(word for pair in words.items() for word in pair)]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: {len(said)} problems")
    for word in said:
        assert word in text


def test_a_changed_run_is_refused_before_the_data_is_read(
    own_files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    yaml = str(own_files / "run.yaml")
    assert main(["train", yaml, "--schedule.steps=1"]) == 0
    monkeypatch.setattr("megatrain.data.load.open_data", lambda *_, **__: pytest.fail("the data were read"))
    for command in ("check", "train"):
        assert main([command, yaml, "--resume=auto", "--optim.eps=1e-6", "--run.seed=2"]) == 2
        assert "--allow-changes seed,optim" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", yaml, "--resume=auto", "--allow-changes", "data,optimizer"])
    assert "'optimizer' is not one of data, batch, seed, schedule, optim, precision" in capsys.readouterr().err


def test_check_compares_shapes_by_the_file_headers_only(own_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_file = own_files / "model" / "config.json"
    config_file.write_text(config_file.read_text().replace('"intermediate_size": 48', '"intermediate_size": 64'))
    assert main(["check", str(own_files / "run.yaml")]) == 2
    text = capsys.readouterr().err
    assert "has shape (48, 32) in the checkpoint, the config makes it (64, 32)" in text
    assert "config.json and weights do not belong together" in text


def test_check_creates_no_run_folder_and_prints_the_run(own_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(own_files / "run.yaml")]) == 0
    assert not (own_files / "run").exists()
    out = capsys.readouterr().out
    for word in ("LlamaForCausalLM", "4 steps of 256 tokens", "host memory", "disk", "all checks passed"):
        assert word in out


def test_a_step_larger_than_the_data_is_reported(own_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(own_files / "run.yaml")]) == 0
    assert "one epoch" not in capsys.readouterr().out
    assert main(["check", str(own_files / "run.yaml"), "--batch.tokens_per_step=65536"]) == 0
    out = capsys.readouterr().out
    assert "a step is 1,024 rows but an epoch only" in out
    assert "smaller than configured" in out


def test_an_implausible_learning_rate_is_reported(own_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rate, is_said in (("5", True), ("0.1", False)):
        assert main(["check", str(own_files / "run.yaml"), f"--optim.learning_rate={rate}"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("optim.learning_rate: 5 will most likely diverge with AdamW" in out) == is_said
        assert ("1e-6 to 1e-4 for fine-tuning" in out) == is_said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "run.yaml", "--learning_rate", "1"], 'did you mean "--optim.learning_rate"?'),
        (["train", "run.yaml", "--allow-changes=data"], "--allow-changes: requires --resume"),
        (["train", "nothing.yaml"], "nothing.yaml: no such file"),
        (["eval", "model"], "model: is the folder of a model, not of a run"),
        (["eval", "run.yaml"], "data.val: is not set"),
        (["eval", "run.yaml", "--data.val=x.txt", "--checkpoint", "nowhere"], "nowhere: no such model folder"),
    ],
)
def test_wrong_arguments(
    own_files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(own_files)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(own_files: Path) -> None:
    code = f"""
        import importlib, sys
        from megatrain.commands.main import main

        importlib.import_module("megatrain.run.preflight").refuse_unwritable = lambda *_: 1 / 0
        sys.exit(main(["train", {str(own_files / "run.yaml")!r}]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" in done.stderr


# What a plain run says, in this order. A line that a user can neither act on nor waits for belongs to --verbose.
SAID = [
    r"model \S+: LlamaForCausalLM, 39.8 K parameters in 2 layers, fp32 compute on cpu, fp32 master weights and moments",
    r"host memory: .* needed, .* available",
    r"disk: .* per checkpoint, at most 2 at once, in \S+",
    r"\S+texts.jsonl: format text .*: 60 samples, .* tokens, .* trained( \(from the cache\))?",
    r"train: .* rows of 64 tokens, .* filled; .*",
    r"val: .* rows of 64 tokens, .*",
    r"4 steps of 256 tokens \(\d per epoch\); constant schedule, 0 steps of warm-up to 0.001",
    r"reading the weights",
    r"first step",
    r"step 1/4  loss .*",
    r"step 2/4  loss .*",
    r"step 2: validating",
    r"step 2: validation loss .*",
    r"saving step 2 .*",
    r"step 2: saved \S+ in .* s",
    r"step 3/4  loss .*",
    r"step 4/4  loss .*",
    r"step 4: validating",
    r"step 4: validation loss .*",
    r"saving step 4 .*",
    r"step 4: saved \S+ in .* s",
    r"4 steps done; training loss .*; validation loss .*; checkpoint \S+; picture \S+",
]


def test_a_run_says_what_its_user_can_act_on_and_nothing_else(
    own_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.val={fraction: 0.2}", "--eval.every_steps=2", "--checkpoint.every_steps=2"]
    words.append("--checkpoint.background=false")
    assert main(["train", str(own_files / "run.yaml"), *words]) == 0
    shown = capsys.readouterr()
    unexpected = [line for line in shown.out.splitlines() if not any(re.fullmatch(said, line) for said in SAID)]
    assert unexpected == []
    assert [said for said in SAID if len(re.findall(f"^{said}$", shown.out, flags=re.MULTILINE)) != 1] == []
    assert shown.err == ""
    assert main(["train", str(own_files / "run.yaml"), "--verbose", f"--run.dir={own_files}/again", *words]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= len(SAID)

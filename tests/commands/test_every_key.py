"""Every key of the config, and every word that a key can take, goes once through `megatrain train`.

A row of a table sets some keys on top of one small run of four steps. What must not change the training gives the losses of that
run; what must change it gives others. Rows of the mesh engine run on two processes, which are started once for all of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch.distributed as dist
from huggingface_hub import constants
from ruamel.yaml import YAML

import mesh_ranks as ranks
from megatrain.commands.main import main
from megatrain.config.load import alternatives, fields, load_config, model_in
from megatrain.metrics.plot import LossPlot
from megatrain.metrics.record import read_records
from tiny_run import config, sentence, write_chats, write_model, write_texts
from tiny_tokenizer import CHATML

SHA = "0123456789abcdef0123456789abcdef01234567"
CHATS = "--data.train={files}/chats.jsonl"
LONG = "--data.train={files}/long.jsonl"
"""Some of its samples are longer than a row."""


@dataclass(frozen=True)
class Row:
    """A run with some keys set.

    Attributes:
        words: Overrides; `{files}` is the folder of the files.
        losses: `same`: those of the run without them; `other`: not those; `like`: those of the row of that name; `any`: a run
            of another length or of other data, which only has to end well.
        like: See `losses`.
        said: Text that the log must have.
        made: Files that the run's folder must have.
    """

    words: str
    losses: Literal["same", "other", "like", "any"] = "same"
    like: str = ""
    said: tuple[str, ...] = ()
    made: tuple[str, ...] = ()


ACTIONS = (
    "link_share gpu_busy speed device_memory slab_wait optimizer_wait data_wait expert_share expert_idle allocation_retries"
).split()


SHARES = ACTIONS[:-1]


def alerts(action: str, limit: str) -> str:
    rules = [f"--alerts.{rule}_action={action}" for rule in ACTIONS]
    rules += [f"--alerts.{rule}={limit if rule in SHARES or limit == 'null' else 9}" for rule in ACTIONS]
    return f"--alerts.steps=99 {' '.join(rules)}"


ONE_PROCESS: dict[str, Row] = {
    "another attention": Row("--model.attn_implementation=eager --model.trust_remote_code=true"),
    "no auxiliary loss": Row("--model.router_aux_loss=false --model.router_bias_update_speed=null"),
    "random weights": Row("--model.init=random", "other"),
    "the mesh engine": Row("--engine=mesh --run.threads=null"),
    "a source with all its keys": Row(
        "--data.train=[{{path: {files}/texts.jsonl, weight: 1, format: text, columns: {{text: text}}, ignore: [label], "
        "subset: null, split: null}}]"
    ),
    "a weight": Row("--data.train=[{{path: {files}/texts.jsonl, weight: 2}}]", "other"),
    "all formats": Row(
        "--data.train=["
        + ", ".join(
            f"{{{{path: {{files}}/{name}.jsonl, format: {name}}}}}"
            for name in ("text", "messages", "sharegpt", "alpaca", "prompt_completion", "tokens")
        )
        + ", {{path: {files}/lines.txt, format: lines}}]",
        "any",
    ),
    "a cached dataset": Row("--data.train=[{{path: org/some-set, subset: de, split: train}}]", "any"),
    "own held-out data": Row("--data.val={{sources: [{{path: {files}/chats.jsonl}}]}}", "other"),
    "no held-out data": Row("--data.val=null", "any"),
    "shorter rows": Row("--data.max_tokens=32", "other"),
    "long samples dropped": Row(f"{LONG} --data.overflow=drop", "any", said=("longer than",)),
    "long samples truncated": Row(f"{LONG} --data.overflow=truncate", "any", said=("longer than",)),
    "long samples split": Row(f"{LONG} --data.overflow=split", "any", said=("longer than",)),
    "chats, trained on the answers": Row(f"{CHATS} --data.train_on=assistant", "any"),
    "chats, the last answer": Row(f"{CHATS} --data.train_on=last_assistant", "like", "chats, trained on the answers"),
    "chats, trained on all": Row(f"{CHATS} --data.train_on=all", "any"),
    "a chat template": Row(
        f"{CHATS} --data.chat_template={{files}}/template.jinja", "like", "chats, trained on the answers"
    ),
    "keywords and the date of a template": Row(
        f"{CHATS} --data.chat_template_kwargs={{{{enable_thinking: false}}}} --data.date=2026-01-31",
        "like",
        "chats, trained on the answers",
    ),
    "special tokens are text": Row("--data.special_tokens=text"),
    "special tokens are control tokens": Row("--data.special_tokens=control"),
    "special tokens are refused": Row("--data.special_tokens=reject"),
    "without packing": Row(f"{CHATS} --data.packing=false", "any"),
    "rejects and a cache": Row("--data.allow_rejects=0.5 --data.left_out=warn --data.cache_dir={files}/cache2"),
    "a divided step": Row("--batch.microbatch_rows=1 --batch.head_chunk_tokens=16 --batch.accumulation_steps=2"),
    "a smaller step": Row("--batch.tokens_per_step=128", "other"),
    "frozen parts": Row("--train.freeze=[embed_tokens] --train.only=[layers]", "other", said=("training ",)),
    "learning rate": Row("--optim.learning_rate=1e-2", "other"),
    "weight decay": Row("--optim.weight_decay=0.5", "other"),
    "betas": Row("--optim.betas=[0.5, 0.9]", "other"),
    "eps": Row("--optim.eps=1e-2", "other"),
    "bf16 moments": Row("--optim.moments=bf16", "other"),
    "int8 moments": Row("--optim.moments=int8", "other"),
    "clipping": Row("--optim.max_grad_norm=0.01 --optim.eps=1e-3", "other"),
    "no clipping": Row("--optim.max_grad_norm=null", "other"),
    "groups": Row("--optim.groups=[{{pattern: mlp, weight_decay: 0.5, lr_scale: 0.1}}]", "other"),
    "linear": Row("--schedule.kind=linear --schedule.min_lr_ratio=0.1", "other"),
    "cosine": Row("--schedule.kind=cosine --schedule.warmup_ratio=0.5", "other", said=("2 steps of warm-up",)),
    "wsd": Row("--schedule.kind=wsd --schedule.decay_ratio=0.5 --schedule.warmup_steps=1", "other"),
    "constant, by epochs": Row("--schedule.kind=constant --schedule.steps=null --schedule.epochs=0.5"),
    "pinned": Row("--memory.pin=all --memory.weight_slots=3 --memory.gradient_slabs=2"),
    "staged": Row("--memory.pin=staged"),
    "a slot for each layer": Row("--memory.weight_slots=all"),
    "no gradient plane": Row("--memory.gradient_plane=false --optim.max_grad_norm=null", "like", "no clipping"),
    "limits of memory": Row(
        "--memory.host_gib=1 --memory.device_gib=1 --memory.device_fraction=0.5 --memory.host_reserve_gib=0.01"
    ),
    "keep": Row("--activations.policy=keep --activations.compile=off"),
    "selective": Row("--activations.policy=selective"),
    "recompute": Row("--activations.policy=recompute --activations.offload_input=on"),
    "keep attention": Row("--activations.attention=keep --activations.mlp=recompute --activations.mlp_chunk_tokens=16"),
    "keep MLPs": Row("--activations.attention=recompute --activations.mlp=keep --activations.offload_input=off"),
    "segments": Row("--activations.segment=2"),
    "bf16": Row("--precision.compute_dtype=bf16 --precision.grad_transport=bf16", "other"),
    "fp16": Row("--precision.compute_dtype=fp16", "any"),
    "fp32": Row("--precision.compute_dtype=fp32 --precision.grad_transport=fp32"),
    "evaluations": Row("--eval.at_start=true --eval.at_end=false --eval.every_steps=4", "any"),
    "saves": Row(
        "--checkpoint.every_steps=1 --checkpoint.keep=1 --checkpoint.keep_every=2 --checkpoint.at_end=true "
        "--checkpoint.buffer_gib=0.5 --checkpoint.on_error=warn --checkpoint.weights_every_steps=3",
        made=("checkpoints/step_000002/config.json", "checkpoints/step_000004/config.json", "weights/step_000003"),
    ),
    "saves in the foreground": Row(
        "--checkpoint.background=false --checkpoint.every_steps=2", made=("checkpoints/step_000004/config.json",)
    ),
    "limits of the watchdog": Row(
        "--watchdog.start_s=99 --watchdog.first_step_s=99 --watchdog.step_s=99 --watchdog.save_s=99 --watchdog.load_s=99 "
        "--watchdog.evaluation_s=99 --watchdog.mfu_floor=0.1 --watchdog.sample_every_steps=2 "
        "--engine=mesh --run.threads=null"
    ),
    "metrics": Row(
        "--metrics.project=mine --metrics.instruments=false --metrics.print_every_s=0 --metrics.trackers=[]"
    ),
    "alerts that save": Row(alerts("save", "0.5")),
    "alerts that stop": Row(alerts("stop", "0.5")),
    "alerts that go back": Row(alerts("rollback", "0.5")),
    "no alerts": Row(alerts("warn", "null") + " --run.deterministic=false"),
    "seed": Row("--run.seed=7", "other"),
    "one copy for all hosts": Row("--run.replicate_hosts=false"),
    "run": Row(
        "--run.replicate_hosts=true "
        "--run.device=auto --run.gpus=1 --run.max_restarts=0 --run.threads=2 --run.deterministic=true --run.max_bad_steps=2 "
        "--run.loss_spike=9 --run.on_divergence=rollback --run.max_rollbacks=1 "
        "--run.allow_changes=[data, batch, seed, schedule, optim, precision]"
    ),
}
TWO_PROCESSES: dict[str, Row] = {
    "the host engine": Row("--engine=host"),
    "shard": Row("--parallel.shard=2"),
    "replicate": Row("--parallel.replicate=2"),
    "tensor": Row("--parallel.tensor=2"),
    "context": Row("--parallel.context=2"),
    "1f1b": Row("--parallel.pipeline=2 --parallel.schedule=1f1b --parallel.stage_layers=[3, 1]"),
    "1f1b, four microbatches": Row("--parallel.pipeline=2 --parallel.microbatches=4"),
    "interleaved": Row("--parallel.pipeline=2 --parallel.virtual=2 --parallel.schedule=interleaved"),
    "zb1p": Row("--parallel.pipeline=2 --parallel.schedule=zb1p"),
    "zbv": Row("--parallel.pipeline=2 --parallel.virtual=2 --parallel.schedule=zbv"),
    "dualpipev": Row("--parallel.pipeline=2 --parallel.virtual=2 --parallel.schedule=dualpipev"),
    "sizes by the number of processes": Row("--parallel.tensor=8 --parallel.by_world_size={{2: {{pipeline: 2}}}}"),
    "keep": Row("--parallel.tensor=2 --activations.policy=keep --activations.compile=off"),
    "recompute": Row("--parallel.pipeline=2 --parallel.schedule=zb1p --activations.policy=recompute"),
    "selective": Row("--activations.policy=selective", said=("recomputing whole layers",)),
    "bf16": Row("--precision.compute_dtype=bf16", "other"),
    "another attention": Row("--model.attn_implementation=eager"),
    "random weights": Row("--model.init=random --parallel.tensor=2", "any"),
    "no clipping, another optimizer": Row(
        "--optim.max_grad_norm=null --optim.groups=[{{pattern: mlp, weight_decay: 0.5, lr_scale: 0.1}}]", "other"
    ),
    "without packing": Row(f"{CHATS} --data.packing=false --parallel.context=2", "any"),
    "a saving run": Row(
        "--parallel.pipeline=2 --checkpoint.every_steps=2 --checkpoint.weights_every_steps=3 --eval.at_start=true",
        "any",
        made=("checkpoints/step_000002/config.json", "checkpoints/step_000004/config.json", "weights/step_000003"),
    ),
    "limits of the watchdog": Row(
        "--watchdog.start_s=99 --watchdog.first_step_s=99 --watchdog.step_s=99 --watchdog.save_s=99 --watchdog.load_s=99 "
        "--watchdog.evaluation_s=99 --watchdog.mfu_floor=0.1 --watchdog.sample_every_steps=2"
    ),
    "alerts": Row(alerts("stop", "0.5")),
    "the rest": Row(
        "--memory.host_reserve_gib=0.01 --batch.head_chunk_tokens=16 --metrics.project=mine --metrics.instruments=false "
        "--metrics.print_every_s=0 --run.max_bad_steps=2 --run.loss_spike=9 --run.on_divergence=rollback "
        "--run.max_rollbacks=1 --checkpoint.background=false --checkpoint.on_error=warn"
    ),
}
ELSEWHERE = {
    ("run.device", "cuda"): "no GPU here; tests/engine/host/test_gpu.py",
    ("model.router_aux_loss", True): "this model has no experts; tests/engine/test_router_loss.py",
    **{("metrics.trackers", name): "tests/metrics/test_trackers.py" for name in ("tensorboard", "wandb", "trackio")},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("every_key")
    write_model(folder / "model", num_hidden_layers=4)
    write_texts(folder / "texts.jsonl", 60)
    write_chats(folder / "chats.jsonl", 60)
    (folder / "template.jinja").write_text(CHATML)
    rng = random.Random(3)
    one: dict[str, Any] = {
        "text": lambda: {"text": sentence(rng, 30)},
        "messages": lambda: {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "fox"}]},
        "sharegpt": lambda: {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "fox"}]},
        "alpaca": lambda: {"instruction": "what is", "output": sentence(rng, 9)},
        "prompt_completion": lambda: {"prompt": "what is ", "completion": sentence(rng, 9)},
        "tokens": lambda: {"input_ids": [rng.randrange(9, 200) for _ in range(30)]},
    }
    for name, make in one.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(make()) + "\n" for _ in range(20)))
    (folder / "lines.txt").write_text("".join(sentence(rng, 20) + "\n" for _ in range(20)))
    long = [{"prompt": "the ", "completion": sentence(rng, 20 if n % 4 else 90)} for n in range(60)]
    (folder / "long.jsonl").write_text("".join(json.dumps(record) + "\n" for record in long))
    snapshot = folder / "hub" / "datasets--org--some-set" / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(SHA)
    (snapshot / "README.md").write_text("---\nconfigs:\n- {config_name: de, data_files: german.jsonl}\n---\n")
    (snapshot / "german.jsonl").write_bytes((folder / "texts.jsonl").read_bytes())
    sections: dict[str, Any] = {
        "data": {"val": {"fraction": 0.2}},
        "eval": {"every_steps": 2},
        "checkpoint": {"at_end": False},
        "precision": {"compute_dtype": "fp32"},
    }
    plain = config(folder, **sections)
    YAML().dump(plain, folder / "host.yaml")
    del plain["run"]["threads"]
    YAML().dump({**plain, "engine": "mesh"}, folder / "mesh.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr(LossPlot, "draw", lambda *_: None)  # two thirds of the time of such a run; no key is about it
        yield folder


def words_of(row: Row, files: Path) -> list[str]:
    given = row.words.format(files=files)
    return [f"--{word}" for word in given.removeprefix("--").split(" --")] if given else []


def losses(folder: Path) -> list[float]:
    """Training and validation losses, in order."""
    found = [value for r in read_records(folder / "metrics.jsonl") for value in (r.loss, r.val_loss)]
    return [value for value in found if value is not None]


@dataclass
class Outcome:
    code: int
    output: str
    folder: Path


def train(yaml: Path, folder: Path, words: list[str]) -> Outcome:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(["train", str(yaml), "--run.dir", str(folder), *words])
        except BaseException as error:
            code = int(error.code or 0) if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
            output.write(traceback.format_exc())
    return Outcome(code, output.getvalue(), folder)


@pytest.fixture(scope="module")
def alone(files: Path) -> Mapping[str, Outcome]:
    """Outcome by row of one process, run when it is asked for; the row "" sets nothing."""

    class Runs(dict[str, Outcome]):
        def __missing__(self, name: str) -> Outcome:
            row = ONE_PROCESS[name] if name else Row("")
            self[name] = train(files / "host.yaml", files / "runs" / f"one, {name}", words_of(row, files))
            return self[name]

    return Runs()


@pytest.fixture(scope="module")
def together(files: Path, alone: Mapping[str, Outcome]) -> Mapping[str, Outcome]:
    """Outcome by row of two processes; the code is the larger one, the output that of both.

    After a row that failed the processes are not in the same place any more: the rows behind it are not run.
    """
    folder = files / "runs"
    folder.mkdir(exist_ok=True)

    def work() -> None:
        with (folder / f"rank {dist.get_rank()}.jsonl").open("w") as notes:
            for name, row in TWO_PROCESSES.items():
                found = train(files / "mesh.yaml", folder / f"two, {name}", words_of(row, files))
                notes.write(json.dumps([name, found.code, found.output]) + "\n")
                notes.flush()
                if found.code:
                    return

    # a rank that hangs: the rows before it have their outcomes
    with contextlib.suppress(ranks.RankFailed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "TIMEOUT_S", 280)  # half a minute on two idle cores
        ranks.run(2, work)
    noted: dict[str, list[tuple[int, str]]] = {}
    for file in sorted(folder.glob("rank *.jsonl")):
        for line in file.read_text().splitlines():
            name, code, output = json.loads(line)
            noted.setdefault(name, []).append((code, output))
    found: dict[str, Outcome] = {}
    for name in TWO_PROCESSES:
        both = noted.get(name, [])
        code = max((code for code, _ in both), default=1) or int(len(both) < 2)
        output = "".join(text for _, text in both) or "not run, or hung: see the first row that failed"
        found[name] = Outcome(code, output, folder / f"two, {name}")
    return found


def check(row: Row, found: Outcome, alone: Mapping[str, Outcome]) -> None:
    assert found.code == 0, found.output
    mine, plain = losses(found.folder), losses(alone[""].folder)
    assert mine
    match row.losses:
        case "same":
            assert mine == pytest.approx(plain, rel=1e-5)
        case "like":
            assert mine == pytest.approx(losses(alone[row.like].folder), rel=1e-5)
        case "other":
            assert mine != plain
    log = (found.folder / "log.txt").read_text()
    assert [text for text in row.said if text not in log] == []
    assert [name for name in row.made if not (found.folder / name).exists()] == []


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(name: str, alone: Mapping[str, Outcome]) -> None:
    check(ONE_PROCESS[name], alone[name], alone)


@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes(name: str, together: Mapping[str, Outcome], alone: Mapping[str, Outcome]) -> None:
    check(TWO_PROCESSES[name], together[name], alone)


def test_no_key_and_no_word_of_a_key_is_left_out(files: Path) -> None:
    """A new key needs a row above."""
    used: dict[str, list[Any]] = {}
    for yaml, rows in (("host", ONE_PROCESS), ("mesh", TWO_PROCESSES)):
        for row in rows.values():
            run = load_config(files / f"{yaml}.yaml", words_of(row, files))
            for key, value in _set_keys(run.model_dump(exclude_unset=True)):
                used.setdefault(key, []).append(value)
    missing = []
    for loc, info in fields():
        key = ".".join(map(str, loc))
        if key.startswith("data.val.sources.N."):
            continue  # as in data.train
        if model_in(info.annotation) is not None:
            continue  # a section; its keys follow
        if key not in used:
            missing.append(key)
        seen = [one for value in used.get(key, []) for one in (value if isinstance(value, list | tuple) else [value])]
        for word in _words(info.annotation):
            if word not in (*seen, info.default) and (key, word) not in ELSEWHERE:
                missing.append(f"{key}: {word}")
    assert not missing, "\n".join(missing)


def _set_keys(plain: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is set, with N for the index into a list."""
    if isinstance(plain, dict) and not key.endswith(("by_world_size", ".columns", "chat_template_kwargs")):
        for name, value in plain.items():
            yield from _set_keys(value, f"{key}.{name}" if key else name)
        return
    yield key, plain
    if isinstance(plain, list | tuple):
        for one in plain:
            if isinstance(one, dict):
                yield from _set_keys(one, f"{key}.N")


def _words(annotation: Any) -> Iterator[Any]:
    """The words that a key takes: of a Literal, also inside a list; true and false."""
    for kind in alternatives(annotation):
        if get_origin(kind) is Literal:
            yield from get_args(kind)
        elif get_origin(kind) is tuple:
            yield from _words(get_args(kind)[0])
        elif kind is bool:
            yield from (True, False)

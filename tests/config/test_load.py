"""Loading a config from YAML and overrides, and the error messages."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config.docs import describe_keys
from megatrain.config.load import dump_config, fields, load_config, split_overrides, suggest_key
from megatrain.config.schema import RunConfig
from megatrain.errors import UserError

SMALLEST = {
    "model": {"path": "m"},
    "data": {"train": "a.jsonl"},
    "batch": {"tokens_per_step": 4096},
    "run": {"dir": "r"},
}


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def problem(source: object, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(source, overrides)  # type: ignore[arg-type]
    return str(caught.value)


def test_four_keys_are_enough() -> None:
    run = load_config(SMALLEST)
    assert run.data.train[0].path == "a.jsonl"
    assert run.rows_per_step == 2


def test_the_ten_keys_of_a_first_run(tmp_path: Path) -> None:
    run = load_config(
        write(
            tmp_path,
            """
            model:    {path: Qwen/Qwen3-32B}
            data:     {train: [{path: data/chat.jsonl}, {path: data/wiki/, weight: 0.3}], val: {fraction: 0.01}, max_tokens: 8192}
            batch:    {tokens_per_step: 524288}
            optim:    {learning_rate: 1e-5}
            schedule: {kind: cosine, warmup_ratio: 0.03, epochs: 1}
            run:      {dir: runs/qwen}
            """,
        )
    )
    assert run.data.train[1].weight == 0.3
    assert run.data.val is not None
    assert run.data.val.fraction == 0.01
    assert run.schedule.total_steps(steps_per_epoch=7) == 7


def test_numbers_and_booleans_follow_yaml_1_2(tmp_path: Path) -> None:
    """In YAML 1.1, `1e-5` would be a string and `no` would be False."""
    text = """
        model: {path: no}
        data: {train: on.jsonl, packing: false}
        batch: {tokens_per_step: 4096}
        optim: {learning_rate: 1e-5, eps: 1E-9}
        run: {dir: "2024"}
    """
    run = load_config(write(tmp_path, text))
    assert run.model.path == "no"
    assert run.optim.learning_rate == 1e-5
    assert run.optim.eps == 1e-9
    assert run.data.packing is False


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--optim.learning_rate=abc", "expected a number, found the text 'abc'"),
        ('--optim.learning_rate="1e-5"', "expected a number, found the text '1e-5'"),
        ("--batch.tokens_per_step=true", "expected a number, found a boolean"),
        ("--batch.tokens_per_step=4096.5", "should be a whole number, found 4096.5"),
        ("--data.packing=no", "found the text 'no'; a boolean is written true or false"),
        ("--data.packing=1", "should be true or false, found 1"),
        ("--optim.learning_rate=0", "greater than 0"),
        ("--optim.learning_rate=.inf", "finite"),
        ("--optim.betas=[0.9, 1.0]", "less than 1"),
        ("--memory.host_gib=lots", "should be auto or a positive number of GiB, found 'lots'"),
        ("--schedule.kind=cosin", 'did you mean "cosine"?'),
        ("--engine=hots", 'did you mean "host"?'),
        ("--data.val={fraction: 0.1, path: x}", "either a fraction or sources"),
        ("--optim.groups=[{pattern: '('}]", "not a regular expression"),
        ("--data.train=[]", "at least one item"),
        ("--memory.gradient_plane=false", "cannot be false: clipping needs it"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(override: str, message: str) -> None:
    text = problem(SMALLEST, override)
    assert text.startswith(override.partition("=")[0])
    assert message in text


def test_a_misspelt_key_is_an_error_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    text = """\
        model: {path: m}
        data:
          train: a.jsonl
          max_token: 1024
        batch: {tokens_per_step: 4096}
        optim:
          # a comment moves the lines
          learning_rte: 1e-5
        run: {dir: r}
    """
    path = write(tmp_path, text)
    text = problem(path)
    assert f'{path}:4 data.max_token: unknown key; did you mean "data.max_tokens"?' in text
    assert f'{path}:8 optim.learning_rte: unknown key; did you mean "optim.learning_rate"?' in text


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("optim.lr", "optim.learning_rate"),
        ("optim.warmup_ratio", "schedule.warmup_ratio"),
        ("learning_rate", "optim.learning_rate"),
        ("data.train.0.wieght", "data.train.weight"),
        ("schedule.num_train_epochs", "schedule.epochs"),
        ("modle", "model"),
        ("output_dir", "run.dir"),
        ("batch.windows", "batch.accumulation_steps"),
        ("batch.chunk_rows", "batch.microbatch_rows"),
        ("activations.offload", "activations.offload_input"),
        ("optim.xyzzy", None),
    ],
)
def test_suggestions(wrong: str, meant: str | None) -> None:
    assert suggest_key(wrong) == meant


def test_all_problems_are_reported_at_once_in_file_order(tmp_path: Path) -> None:
    text = """\
        model: {path: m, init: randm}
        data: {train: [{path: a, weight: -1}], max_tokens: 0}
        batch: {tokens_per_step: many}
        schedule: {epochs: 1, steps: 2}
        surprise: 1
    """
    path = write(tmp_path, text)
    lines = problem(path).splitlines()
    assert lines[0] == "7 problems in the config"
    places = [line.strip().split(": ")[0].removeprefix(str(path)) for line in lines[1:]]
    assert places == [
        " run",
        ":1 model.init",
        ":2 data.train.0.weight",
        ":2 data.max_tokens",
        ":3 batch.tokens_per_step",
        ":4 schedule",
        ":5 surprise",
    ]


def test_a_missing_key_is_described() -> None:
    text = problem({**SMALLEST, "batch": None})
    assert "batch.tokens_per_step: missing; tokens per optimizer step" in text
    assert "run: missing; a section with dir" in problem({key: SMALLEST[key] for key in ("model", "data", "batch")})


def test_tokens_per_step_must_be_whole_rows() -> None:
    text = problem(SMALLEST, "--batch.tokens_per_step", "5000")
    assert text.startswith("--batch.tokens_per_step: must be a multiple of data.max_tokens (2048)")
    assert "4096 or 6144" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found nothing"),
        (b"- a\n- b\n", "found a list"),
        (b"model: {path: m}\nmodel: {path: n}\n", ":2"),
        (b"model:\n\tpath: m\n", ":2"),
        (b"model: [m\n", "not valid YAML"),
        (b"model: {path: \xff}\n", "not UTF-8"),
    ],
)
def test_files_that_are_not_a_config(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert message in problem(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert "no such file" in problem(tmp_path / "none.yaml")
    assert "cannot be read" in problem(tmp_path)


def test_overrides_can_be_written_in_several_ways() -> None:
    words = "--optim.learning_rate 2e-5 --optim.weight-decay=0.2 schedule.steps=3 --data.packing --run.dir 2024 --model.path no"
    run = load_config(SMALLEST, words.split())
    assert run.optim.learning_rate == 2e-5
    assert run.optim.weight_decay == 0.2
    assert run.schedule.steps == 3
    assert run.data.packing is True
    assert run.run.dir == "2024"
    assert run.model.path == "no"


def test_overrides_of_lists_null_and_globs() -> None:
    run = load_config(
        SMALLEST, ["--data.train", "*.jsonl", "--optim.max_grad_norm", "null", "--optim.betas", "[0.8, 0.9]"]
    )
    assert run.data.train[0].path == "*.jsonl"
    assert run.optim.max_grad_norm is None
    assert run.optim.betas == (0.8, 0.9)
    listed = {**SMALLEST, "data": {"train": [{"path": "a"}, {"path": "b"}]}}
    assert load_config(listed, ["--data.train.1.weight", "3"]).data.train[1].weight == 3
    assert "count from 0" in problem(listed, "--data.train.2.weight", "3")
    assert "set --data.train itself" in problem(SMALLEST, "--data.train.0.weight", "3")


def test_an_override_beats_the_file_and_leaves_it_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(load_config(SMALLEST)))
    before = path.read_text()
    assert load_config(path, ["--batch.tokens_per_step", "2048"]).batch.tokens_per_step == 2048
    assert path.read_text() == before


def test_an_override_without_a_value_is_refused() -> None:
    assert "has no value" in problem(SMALLEST, "--optim.learning_rate", "--data.packing", "true")


def test_words_that_are_not_overrides_are_left_alone() -> None:
    words = ["run.yaml", "--resume", "auto", "--checkpoint", "x/y", "--model=5", "--run.seed", "3", "--help"]
    overrides, rest = split_overrides(words)
    assert [override.flag for override in overrides] == ["--run.seed"]
    assert rest == ["run.yaml", "--resume", "auto", "--checkpoint", "x/y", "--model=5", "--help"]


def test_an_unknown_override_is_reported_as_an_unknown_key() -> None:
    assert problem(SMALLEST, "--optim.learnig_rate", "1") == (
        '--optim.learnig_rate: unknown key; did you mean "optim.learning_rate"?'
    )


configs = st.builds(
    lambda rate, eps, clip, epochs, gib, val, text, packing: load_config(
        {
            **SMALLEST,
            "optim": {"learning_rate": rate, "eps": eps, "max_grad_norm": clip},
            "schedule": {"epochs": epochs},
            "memory": {"host_gib": gib},
            "data": {"train": [text, {"path": "b", "columns": {"text": text}}], "val": val, "packing": packing},
        }
    ),
    rate=st.floats(1e-12, 1.0),
    eps=st.floats(1e-30, 1e-3),
    clip=st.none() | st.floats(1e-3, 1e3),
    epochs=st.none() | st.floats(0.01, 100),
    gib=st.just("auto") | st.floats(0.1, 1e5),
    val=st.sampled_from([None, {"fraction": 0.1}, "v.txt", ["v.txt", "w.txt"], {"path": "v"}]),
    text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)
    | st.sampled_from(["no", "1e-5", "null", "~"]),
    packing=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(configs)
def test_a_dumped_config_loads_back_equal(tmp_path_factory: pytest.TempPathFactory, run: RunConfig) -> None:
    path = tmp_path_factory.mktemp("round") / "config.yaml"
    path.write_text(dump_config(run), encoding="utf-8")
    assert load_config(path) == run


def test_every_key_is_documented_and_in_the_help_in_yaml_order() -> None:
    text = describe_keys()
    place = 0
    for loc, info in fields():
        name = ".".join(map(str, loc))
        if len(loc) == 1 and info.description is None:
            assert name in RunConfig.model_fields
            continue
        assert info.description, f"{name} has no description"
        found = text.index(f"--{name} ")
        assert found > place, f"{name} is not in the order of the YAML"
        place = found

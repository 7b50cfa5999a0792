"""The command line: `megatrain train|check|plan|data|eval|trace RUN.yaml [--section.key value ...]`, and more of other forms.

Each command parses its words and calls one public function. Imports of torch and transformers wait until a command needs
them. Exit codes: 0 done, 2 user error, 3 the run does not fit the machine, 4 numeric stop, 130 interrupted. An error of
ours is one message without a traceback; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatrain.errors import MegatrainError, UserError
from megatrain.stop import INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except MegatrainError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  the one print outside the run logger: there is no run
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED


def _run(words: list[str]) -> int:
    from megatrain.config.load import load_config, split_overrides

    overrides, rest = split_overrides(words)
    arguments, unknown = _parser().parse_known_args(rest)
    # tokenizers warns when a process forks after it has used threads; data loading owns the threads here
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if unknown:
        raise _unknown_argument(unknown[0])
    if arguments.command in ("export", "verify"):
        if overrides:
            raise UserError(f"{arguments.command} takes no keys of a config", overrides[0].flag)
        _on_a_checkpoint(arguments)
        return 0
    if arguments.command in ("init", "plot", "monitor"):
        if overrides:
            raise UserError(f"{arguments.command} takes no keys of a config", overrides[0].flag)
        _without_a_config(arguments)
        return 0
    if arguments.command in ("doctor", "bench"):
        if overrides:
            raise UserError(f"{arguments.command} takes no keys", overrides[0].flag, "they belong to RUN.yaml")
        (_doctor if arguments.command == "doctor" else _bench)(arguments)
        return 0
    if arguments.command == "trace" and arguments.shape is not None:
        if overrides or arguments.config is not None:
            raise UserError(
                "trace --shape takes no config", "trace", "give RUN.yaml, or --shape with --rows and --tokens"
            )
        _trace_shape(arguments)
        return 0
    if arguments.config is None:
        raise UserError("trace needs RUN.yaml, or --shape", "trace")
    run = load_config(_config_file(arguments.config), [f"{override.flag}={override.text}" for override in overrides])
    match arguments.command:
        case "train":
            from megatrain.train import train

            train(run, resume=arguments.resume, allow_changes=arguments.allow_changes)
        case "check":
            from megatrain.check import check

            check(run, resume=arguments.resume)
        case "plan":
            from megatrain.planner.report import plan_json, plan_text
            from megatrain.planner.run import plan_run

            made = plan_run(run, machine_file=arguments.machine)
            _say(plan_json(made) if arguments.json else plan_text(made))
        case "trace":
            from megatrain.trace import trace_run

            trace_run(
                run,
                steps=arguments.steps,
                warmup=arguments.warmup,
                out=arguments.out,
                png=arguments.png,
                save=arguments.save,
            )
        case "eval":
            from megatrain.evaluate import evaluate_run

            evaluate_run(run, checkpoint=arguments.checkpoint or _newest_checkpoint(Path(arguments.config)))
        case "data":
            from megatrain.inspect_data import inspect_data

            inspect_data(run, samples=arguments.samples, most_tokens=arguments.tokens)
    return 0


def _on_a_checkpoint(arguments: argparse.Namespace) -> None:
    """The commands that need a checkpoint and no config."""
    from megatrain.checkpoint.export import export, verify
    from megatrain.metrics.logger import RunLogger, quiet_libraries

    quiet_libraries()
    with RunLogger() as log:
        if arguments.command == "export":
            export(
                arguments.checkpoint,
                arguments.out,
                dtype=arguments.dtype,
                trust_remote_code=arguments.trust_remote_code,
                say=log.info,
            )
        else:
            verify(arguments.checkpoint, say=log.info)


def _without_a_config(arguments: argparse.Namespace) -> None:
    """The commands that make a config, or look at runs."""
    match arguments.command:
        case "init":
            from megatrain.init_config import init_config

            init_config(arguments.model, arguments.data, arguments.out)
        case "plot":
            from megatrain.metrics.compare import plot_runs
            from megatrain.metrics.logger import RunLogger

            with RunLogger() as log:
                log.info("wrote " + " and ".join(map(str, plot_runs(arguments.runs, arguments.out, arguments.x))))
        case "monitor":
            from megatrain.monitor import monitor

            monitor(arguments.run, every_s=arguments.every)


def _say(text: str) -> None:
    """A command's result; what a run says goes through the run logger instead."""
    print(text, flush=True)  # noqa: T201


def _doctor(arguments: argparse.Namespace) -> None:
    from megatrain.machine.doctor import doctor

    _say(doctor(arguments.device, again=arguments.again, form=arguments.form))


def _bench(arguments: argparse.Namespace) -> None:
    from megatrain.bench import bench, engine_overrides, report_json

    report = bench(
        arguments.shape,
        rows=arguments.rows,
        tokens=arguments.tokens,
        steps=arguments.steps,
        warmup=arguments.warmup,
        device=arguments.device,
        device_gib=arguments.device_gib,
        host_gib=arguments.host_gib,
        machine_file=arguments.machine,
        bounds=not arguments.no_bounds,
        overrides=engine_overrides(arguments.option),
        say=(lambda text: print(text, file=sys.stderr, flush=True)) if arguments.json else _say,  # noqa: T201
    )
    if arguments.json:
        _say(report_json(report))


def _trace_shape(arguments: argparse.Namespace) -> None:
    from megatrain.bench import engine_overrides
    from megatrain.trace import trace_shape

    trace_shape(
        arguments.shape,
        rows=arguments.rows,
        tokens=arguments.tokens,
        steps=arguments.steps,
        warmup=arguments.warmup,
        out=arguments.out,
        png=arguments.png,
        save=arguments.save,
        device=arguments.device,
        device_gib=arguments.device_gib,
        host_gib=arguments.host_gib,
        machine_file=arguments.machine,
        overrides=engine_overrides(arguments.option),
    )


def _add_machine_commands(commands: argparse._SubParsersAction[_Parser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="measure this machine and say what is wrong with it",
        description="Measure this machine and say what is wrong with it.",
        allow_abbrev=False,
    )
    doctor.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    doctor.add_argument("--again", action="store_true", help="measure again, whatever is in the cache")
    form = doctor.add_mutually_exclusive_group()
    form.add_argument("--json", dest="form", action="store_const", const="json", help="the figures as JSON")
    form.add_argument("--yaml", dest="form", action="store_const", const="yaml", help="the figures as a machine file")
    doctor.set_defaults(form="text")
    bench = commands.add_parser(
        "bench",
        help="training steps with random weights and tokens, beside the plan and the compute bounds",
        description="Training steps with random weights and tokens, beside the plan and the compute bounds.",
        allow_abbrev=False,
    )
    _add_shape(bench, required=True)
    bench.add_argument("--steps", type=_positive, default=6, metavar="N", help="steps that count (6)")
    bench.add_argument("--warmup", type=_positive, default=2, metavar="N", help="steps before them (2)")
    bench.add_argument("--no-bounds", action="store_true", help="leave the compute bounds out")
    bench.add_argument("--json", action="store_true", help="the report as JSON on stdout, everything else on stderr")


def _add_shape(command: argparse.ArgumentParser, required: bool) -> None:
    """The arguments that say which shape runs where."""
    command.add_argument("--shape", required=required, help="qwen3-0.6b, -4b, -8b, -14b, -17b, ..., or a model folder")
    for name, default, what in (("--rows", 8, "rows of a step"), ("--tokens", 1024, "tokens of a row")):
        about = what if required else f"{what} of the shape ({default})"
        command.add_argument(name, type=_positive, required=required, default=default, metavar="N", help=about)
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    command.add_argument("--device-gib", type=float, metavar="X", help="device memory that may be used")
    command.add_argument("--host-gib", type=float, metavar="X", help="host memory that may be used")
    command.add_argument("--machine", metavar="FILE", help="plan with these figures instead of measuring")
    command.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of HostEngine, instead of the plan's"
    )


def _parser() -> argparse.ArgumentParser:
    from megatrain import __version__

    parser = _Parser(
        prog="megatrain",
        description="Train Hugging Face language models far larger than the GPU's memory, in full fp32 precision.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatrain {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    init = commands.add_parser(
        "init",
        help="write a commented RUN.yaml for a model and some data, and check it",
        description="Write a commented RUN.yaml for a model and some data, and check it.",
        allow_abbrev=False,
    )
    init.add_argument("model", metavar="MODEL", help="Hugging Face model folder, or a hub id in the local cache")
    init.add_argument("data", metavar="DATA", nargs="+", help="files, folders or globs")
    init.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("run.yaml"), help="the file to write (default: run.yaml)"
    )
    what = "draw runs over each other, as a PNG and as one HTML file"
    plot = commands.add_parser("plot", help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)
    plot.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="the folder of a run, or its metrics.jsonl")
    plot.add_argument(
        "--out", metavar="NAME", type=Path, default=Path("plot"), help="files to write, without suffix (default: plot)"
    )
    plot.add_argument(
        "--x", choices=("step", "tokens", "hours"), default="step", help="what is drawn to the right (step)"
    )
    what = "watch a run from its files"
    monitor = commands.add_parser(
        "monitor", help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False
    )
    monitor.add_argument("run", metavar="RUN", type=Path, help="the folder of the run")
    monitor.add_argument(
        "--every", metavar="N", type=_positive, default=2, help="seconds between two looks at the files (2)"
    )
    train = _command(commands, "train", "train a model and write checkpoints that transformers loads as they are")
    check = _command(commands, "check", "look at everything that a run needs, without training")
    for command in (train, check):
        command.add_argument(
            "--resume",
            metavar="auto|latest|PATH",
            help="auto: go on from the newest complete checkpoint, or start if there is none; latest: go on or fail; "
            "or a checkpoint's folder",
        )
    train.add_argument(
        "--allow-changes",
        action="store_true",
        help="with --resume: go on although data, tokens per step or past learning rates differ from the checkpoint's",
    )
    evaluate = _command(commands, "eval", "loss and perplexity on the held-out data (data.val)")
    evaluate.add_argument(
        "--checkpoint",
        metavar="PATH",
        type=Path,
        help="a checkpoint's folder, or any model folder; default: the newest checkpoint of a run's folder, model.path of a YAML",
    )
    _add_checkpoint_commands(commands)
    plan = _command(
        commands, "plan", "what goes where, how a step is cut, and what that costs, before anything is allocated"
    )
    plan.add_argument("--machine", metavar="FILE", help="plan for the machine in this file (see docs/machines)")
    plan.add_argument("--json", action="store_true", help="as JSON")
    _add_machine_commands(commands)
    _add_trace(commands)
    data = _command(commands, "data", "show what the data becomes: trained and masked tokens, lengths, rows, rejects")
    data.add_argument("--samples", metavar="N", type=_positive, default=3, help="samples shown of each source (3)")
    data.add_argument("--tokens", metavar="N", type=_positive, default=400, help="tokens shown of each sample (400)")
    return parser


def _add_trace(commands: argparse._SubParsersAction[_Parser]) -> None:
    trace = _command(
        commands, "trace", "the timeline of some steps, for Chrome or Perfetto; of a run, or of a --shape", many="?"
    )
    trace.add_argument("--steps", type=_positive, default=3, metavar="N", help="steps in the trace (3)")
    trace.add_argument("--warmup", type=_positive, default=2, metavar="N", help="steps before them (2)")
    trace.add_argument("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="the trace (trace.json)")
    trace.add_argument("--png", type=Path, metavar="FILE", help="a picture of it, too")
    trace.add_argument("--save", action="store_true", help="write a checkpoint under the traced steps, and remove it")
    _add_shape(trace, required=False)


def _add_checkpoint_commands(commands: argparse._SubParsersAction[_Parser]) -> None:
    what = "write a plain Hugging Face folder from a checkpoint, and prove that it loads and computes the same"
    export = commands.add_parser("export", help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)
    what = "compare every byte of a checkpoint with its checksum, and name what is damaged"
    verify = commands.add_parser("verify", help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)
    for command in (export, verify):
        command.add_argument(
            "checkpoint",
            metavar="RUN_OR_CHECKPOINT",
            type=Path,
            help="a checkpoint's folder, or a run's: its newest one",
        )
    export.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    export.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="default: that of the model that training began with"
    )
    export.add_argument("--trust-remote-code", action="store_true", help="run Python code that the checkpoint brings")


def _positive(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"should be a number from 1, found {word!r}")
    return int(word)


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        text = super().format_help()
        if self.get_default("describe_keys"):
            from megatrain.config.load import describe_keys

            text += "\nkeys of RUN.yaml, each also an override --section.key VALUE:\n" + describe_keys() + "\n"
        return text


def _command(
    commands: argparse._SubParsersAction[_Parser], name: str, what: str, many: str | None = None
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False, usage=None
    )
    command.add_argument("config", metavar="RUN.yaml", nargs=many, help="the run's config, or the folder of a run")
    command.set_defaults(describe_keys=True)
    return command


def _config_file(given: str) -> Path:
    path = Path(given)
    return path / "config.yaml" if path.is_dir() else path


def _newest_checkpoint(given: Path) -> Path | None:
    """What `eval` means by the folder of a run: its newest complete checkpoint, if it has one."""
    if not given.is_dir():
        return None
    from megatrain.checkpoint.reader import latest_complete

    return latest_complete(given / "checkpoints") if (given / "checkpoints").is_dir() else None


def _unknown_argument(word: str) -> UserError:
    from megatrain.config.load import suggest_key

    key = word.lstrip("-").partition("=")[0]
    suggestion = suggest_key(key)
    return UserError(
        f"unknown argument {word!r}" + (f'; did you mean "--{suggestion}"?' if suggestion else ""),
        remedy="see `megatrain train --help`",
    )

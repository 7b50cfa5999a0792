"""The command line: `megatrain train|check|plan|data|eval|trace RUN.yaml [--section.key value ...]`, and more of other forms.

Each command parses its words and calls one public function. Imports of torch and transformers wait until a command needs
them. Exit codes: 0 done, 2 user error, 3 the run does not fit the machine, 4 numeric stop, 5 the disk refuses
a file of a run, 130 interrupted. An error of ours is one message without a traceback; anything else is a bug and keeps its
traceback.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.commands.parser import OF_A_SHAPE, SHAPE_ROWS, SHAPE_TOKENS, parser
from megatrain.errors import MegatrainError, UserError
from megatrain.run.signals import INTERRUPTED

if TYPE_CHECKING:
    from megatrain.config.schema import RunConfig


OF_THE_SYSTEM = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EIO}
)
"""Refusals about a file that no code of ours is to blame for, wherever they come up."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except MegatrainError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201  the one print outside the run logger: there is no run
        return error.exit_code
    except OSError as error:
        if error.errno not in OF_THE_SYSTEM or error.filename is None:
            raise
        remedy = "check the path, and the rights and the room there"
        print(f"error: {UserError(str(error.strerror), str(error.filename), remedy)}", file=sys.stderr)  # noqa: T201
        return UserError.exit_code
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)  # noqa: T201
        return INTERRUPTED


def _run(words: list[str]) -> int:
    from megatrain.config.load import load_config, split_overrides

    if not words:
        parser().print_help(sys.stderr)
        return UserError.exit_code
    overrides, rest = split_overrides(words)
    arguments, unknown = parser().parse_known_args(rest)
    # tokenizers warns when a process forks after it has used threads; data loading owns the threads here
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if unknown:
        raise _unknown_argument(unknown[0], arguments)
    if arguments.command in _WITHOUT_KEYS:
        if overrides:
            raise UserError(
                f"{arguments.command} takes no keys of a config",
                overrides[0].flag,
                f"they belong into RUN.yaml; `megatrain {arguments.command} --help` says what it takes",
            )
        _WITHOUT_KEYS[arguments.command](arguments)
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
    if arguments.command == "trace" and (given := [n for n in OF_A_SHAPE if getattr(arguments, n) not in (None, [])]):
        raise UserError(
            "is an option of a --shape; of a run, the config says it",
            f"--{given[0].replace('_', '-')}",
            "set the key of the config (run.device, batch.tokens_per_step, data.max_tokens, memory.device_gib, ...)",
        )
    if getattr(arguments, "allow_changes", ()) and arguments.resume is None:
        raise UserError("means nothing without --resume", "--allow-changes", "say where to go on: --resume auto")
    run = load_config(_config_file(arguments.config), [f"{override.flag}={override.text}" for override in overrides])
    match arguments.command:
        case "train":
            from megatrain.run.loop import train

            train(run, resume=arguments.resume, allow_changes=arguments.allow_changes)
        case "check":
            from megatrain.run.prepare import check

            check(run, resume=arguments.resume, allow_changes=arguments.allow_changes)
        case "plan":
            (_plan if arguments.world is None else _plan_cluster)(run, arguments)
        case "trace":
            from megatrain.commands.trace import trace_run

            trace_run(
                run,
                steps=arguments.steps,
                warmup=arguments.warmup,
                out=arguments.out,
                png=arguments.png,
                save=arguments.save,
            )
        case "eval":
            from megatrain.run.evaluate import evaluate_run

            evaluate_run(run, checkpoint=arguments.checkpoint or _newest_checkpoint(Path(arguments.config)))
        case "data":
            from megatrain.commands.data import inspect_data

            inspect_data(run, samples=arguments.samples, most_tokens=arguments.tokens)
    return 0


def _plan(run: RunConfig, arguments: argparse.Namespace) -> None:
    _look_at_machine(arguments.machine)
    from megatrain.planner.report import plan_json, plan_text
    from megatrain.planner.run import plan_run

    made = plan_run(run, machine_file=arguments.machine)
    _say(plan_json(made) if arguments.json else plan_text(made))


def _plan_cluster(run: RunConfig, arguments: argparse.Namespace) -> None:
    _look_at_machine(arguments.machine)
    from megatrain.planner.cluster.plan import plan_cluster_run
    from megatrain.planner.cluster.report import cluster_json, cluster_text

    if arguments.machine is None:
        raise UserError(
            "needs the figures of a cluster", "--world", "give --machine FILE (docs/machines/h100-cluster.yaml is one)"
        )
    made = plan_cluster_run(run, machine_file=arguments.machine, world=arguments.world)
    _say(cluster_json(made) if arguments.json else cluster_text(made))


def _look_at_machine(file: str | None) -> None:
    """Say what is wrong with a machine's file before the imports that take seconds."""
    from megatrain.machine.machine import read_figures

    if file is not None:
        read_figures(file)


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
                max_shard_bytes=arguments.max_shard_size,
                trust_remote_code=arguments.trust_remote_code,
                say=log.info,
            )
        else:
            verify(arguments.checkpoint, say=log.info)


def _without_a_config(arguments: argparse.Namespace) -> None:
    """The commands that make a config, look at runs, or at what came of them."""
    match arguments.command:
        case "init":
            from megatrain.commands.init import init_config, parse_columns

            init_config(arguments.model, arguments.data, arguments.out, columns=parse_columns(arguments.columns))
        case "plot":
            from megatrain.metrics.logger import RunLogger
            from megatrain.metrics.plot import plot_runs

            with RunLogger() as log:
                log.info("wrote " + " and ".join(map(str, plot_runs(arguments.runs, arguments.out, arguments.x))))
        case "monitor":
            from megatrain.commands.monitor import monitor

            monitor(arguments.run, every_s=arguments.every)
        case "generate":
            from megatrain.commands.generate import generate

            generate(
                arguments.model,
                arguments.prompt,
                tokens=arguments.tokens,
                temperature=arguments.temperature,
                seed=arguments.seed,
                plain=arguments.plain,
                device=arguments.device,
                trust_remote_code=arguments.trust_remote_code,
            )


def _say(text: str) -> None:
    """A command's result; what a run says goes through the run logger instead."""
    print(text, flush=True)  # noqa: T201


def _doctor(arguments: argparse.Namespace) -> None:
    from megatrain.machine.doctor import doctor

    _say(doctor(arguments.device, again=arguments.again, form=arguments.form))


def _bench(arguments: argparse.Namespace) -> None:
    given = _of_a_shape(arguments)
    from megatrain.commands.bench import bench, report_json

    report = bench(
        arguments.shape,
        **given,
        bounds=not arguments.no_bounds,
        say=(lambda text: print(text, file=sys.stderr, flush=True)) if arguments.json else _say,  # noqa: T201
    )
    if arguments.json:
        _say(report_json(report))


def _trace_shape(arguments: argparse.Namespace) -> None:
    from megatrain.commands.trace import trace_shape

    trace_shape(arguments.shape, **_of_a_shape(arguments), out=arguments.out, png=arguments.png, save=arguments.save)


def _of_a_shape(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the commands that run steps of a shape have in common."""
    _look_at_machine(arguments.machine)
    from megatrain.commands.bench import engine_overrides

    return {
        "rows": arguments.rows or SHAPE_ROWS,
        "tokens": arguments.tokens or SHAPE_TOKENS,
        "steps": arguments.steps,
        "warmup": arguments.warmup,
        "device": arguments.device or "auto",
        "device_gib": arguments.device_gib,
        "host_gib": arguments.host_gib,
        "device_fraction": arguments.device_fraction,
        "machine_file": arguments.machine,
        "overrides": engine_overrides(arguments.option),
    }


def _config_file(given: str) -> Path:
    path = Path(given)
    if not path.is_dir():
        return path
    if (path / "config.json").is_file() and not (path / "config.yaml").exists():
        raise UserError(
            "is a model's folder, not a run's",
            given,
            "give the YAML file of a run; `eval` takes a model with --checkpoint",
        )
    return path / "config.yaml"


def _newest_checkpoint(given: Path) -> Path | None:
    """What `eval` means by the folder of a run: its newest complete checkpoint, if it has one."""
    if not given.is_dir():
        return None
    from megatrain.checkpoint.reader import latest_complete

    return latest_complete(given / "checkpoints") if (given / "checkpoints").is_dir() else None


def _unknown_argument(word: str, arguments: argparse.Namespace) -> UserError:
    """What was probably meant: an option of the command itself, else a key, where the command takes keys."""
    from megatrain.config.load import suggest_key

    name, command = word.lstrip("-").partition("=")[0], arguments.command
    own = {option.replace("_", "-") for option in vars(arguments)} - {"command", "takes-keys"}
    near = difflib.get_close_matches(name.replace("_", "-"), own, n=1)
    suggestion = near[0] if near else None if command in _WITHOUT_KEYS else suggest_key(name)
    return UserError(
        f"unknown argument {word!r}" + (f'; did you mean "--{suggestion}"?' if suggestion else ""),
        remedy=f"see `megatrain {command} --help`" if command in _WITHOUT_KEYS else "see `megatrain train --help-all`",
    )


_WITHOUT_KEYS = {
    "export": _on_a_checkpoint,
    "verify": _on_a_checkpoint,
    "init": _without_a_config,
    "plot": _without_a_config,
    "monitor": _without_a_config,
    "generate": _without_a_config,
    "doctor": _doctor,
    "bench": _bench,
}
"""Commands that take no RUN.yaml, and so no key of one."""

"""The entry point of the command line: run one command, turn errors into messages and exit codes.

Exit codes: 0 done, 2 user error, 3 the run does not fit the machine, 4 the loss diverged, 5 a file of a run cannot be written,
75 a rank hung (watchdog), 130 interrupted. Our own errors are printed without a traceback; any other exception is a bug and
keeps its traceback. torch and transformers are imported only by the commands that need them.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from megatrain.commands.parser import SHAPE_OPTIONS, SHAPE_ROWS, SHAPE_TOKENS, parser
from megatrain.device.compiler import keep_compiled_code
from megatrain.errors import MegatrainError, UserError, WriteFailed
from megatrain.metrics.output import NoReader, checked_output, lasting_output, open_standard_descriptors
from megatrain.run.signals import INTERRUPTED, ending_by_signals
from megatrain.text import printable, visible

if TYPE_CHECKING:
    from megatrain.commands.work import Work
    from megatrain.config.load import Override
    from megatrain.config.schema import RunConfig

FILE_ERRORS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EIO}
)
"""System errors about a file that are never a bug of ours, wherever they occur."""
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Those of a disk that is full or fails."""
WITHOUT_CONFIG = frozenset(("init", "monitor", "plot", "generate", "export", "verify", "doctor", "bench"))
"""Commands that take no RUN.yaml, and so no config keys."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        sys.excepthook = _show_bug
        open_standard_descriptors()
    with lasting_output("stderr"):  # an error keeps its exit code, whether or not anybody reads the message
        return _exit_code(words)


def _exit_code(words: list[str]) -> int:
    try:
        with ending_by_signals(), checked_output():
            return _run(words)
    except NoReader as error:
        return error.exit_code
    except MegatrainError as error:
        _say(f"error: {error}", sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in FILE_ERRORS or error.filename is None:
            raise
        kind = WriteFailed if error.errno in DISK_ERRORS else UserError
        found = kind(str(error.strerror), str(error.filename), "check the path, its permissions and the free space")
        _say(f"error: {found}", sys.stderr)
        return found.exit_code
    except KeyboardInterrupt as interrupt:
        _say(str(interrupt) or "interrupted", sys.stderr)
        return INTERRUPTED


def _run(words: list[str]) -> int:
    from megatrain.config.load import split_overrides

    if not words:
        parser().print_help(sys.stderr)
        return UserError.exit_code
    overrides, rest = split_overrides(words)
    arguments, unknown = parser().parse_known_args(rest)
    with _verbose(arguments.verbose):
        _run_command(arguments, unknown, overrides, words)
    return 0


@contextmanager
def _verbose(wanted: bool) -> Iterator[None]:
    """With `--verbose` the program's own logger is at DEBUG; see metrics/logger.py."""
    logger = logging.getLogger("megatrain")
    level = logger.level
    if wanted:
        logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(level)


def _run_command(
    arguments: argparse.Namespace, unknown: list[str], overrides: list[Override], words: list[str]
) -> None:
    # tokenizers warns when a process forks after using threads; data loading controls the threads here
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    keep_compiled_code()
    command = arguments.command
    if unknown:
        raise _unknown_argument(unknown[0], arguments)
    if command in WITHOUT_CONFIG and overrides:
        remedy = f"they belong in RUN.yaml; see `megatrain {command} --help`"
        raise UserError(f"{command} takes no config keys", overrides[0].flag, remedy)
    if command == "trace":
        _check_trace(arguments, bool(overrides))
    if command in WITHOUT_CONFIG or (command == "trace" and arguments.shape is not None):
        _without_config(arguments, words)
        return
    if getattr(arguments, "allow_changes", ()) and arguments.resume is None:
        raise UserError("requires --resume", "--allow-changes", "say where to resume: --resume auto")
    _with_config(arguments, [f"{override.flag}={override.text}" for override in overrides], words)


def _with_config(arguments: argparse.Namespace, overrides: list[str], words: list[str]) -> None:
    from megatrain.config.load import load_config

    run = load_config(_config_file(arguments.config), overrides)
    match arguments.command:
        case "train":
            if _on_several_ranks(run, words, run.run.max_restarts):
                return
            from megatrain.run.loop import train

            train(run, resume=arguments.resume, allow_changes=arguments.allow_changes)
        case "check":
            from megatrain.run.prepare import check

            check(run, resume=arguments.resume, allow_changes=arguments.allow_changes)
        case "plan":
            show = _put_out if arguments.json else _say
            show(_plan(run, arguments.machine, arguments.world, arguments.json))
        case "trace":
            if run.engine == "host" and _on_several_ranks(run, words, max_restarts=0):
                return
            from megatrain.commands.trace import trace_run

            trace_run(run, **_given(arguments, "steps", "warmup", "out", "png", "save"))
        case "eval":
            if run.engine == "host" and _on_several_ranks(run, words, max_restarts=0):
                return
            from megatrain.run.evaluate import evaluate_run

            evaluate_run(run, checkpoint=arguments.checkpoint or _newest_checkpoint(Path(arguments.config)))
        case "data":
            from megatrain.commands.data import inspect_data

            inspect_data(run, samples=arguments.samples, most_tokens=arguments.tokens)


def _on_several_ranks(run: RunConfig, words: list[str], max_restarts: int) -> bool:
    """Run this command line in a process for each GPU, if the run uses several; False if it is this process's own work."""
    from megatrain.run.ranks import processes_of, start_ranks

    if (count := processes_of(run)) == 1:
        return False
    if code := start_ranks(words, count, max_restarts):
        raise SystemExit(code)  # the ranks have said why
    return True


def _plan(run: RunConfig, machine: str | None, world: int | None, as_json: bool) -> str:
    """The plan of a run, or the parallel layouts of `world` GPUs, as text or JSON."""
    from megatrain.machine.machine import read_figures

    if machine is not None:
        read_figures(machine)  # report a wrong file before the imports below, which take seconds
    from megatrain.metrics.logger import RunLogger

    with RunLogger(stderr=True):
        return _plan_text(run, machine, world, as_json)


def _plan_text(run: RunConfig, machine: str | None, world: int | None, as_json: bool) -> str:
    if world is None:
        from megatrain.planner.report import plan_json, plan_text
        from megatrain.planner.run import plan_run

        made = plan_run(run, machine_file=machine, compare=True)
        return plan_json(made) if as_json else plan_text(made)
    from megatrain.planner.cluster.plan import cluster_json, cluster_text, plan_cluster_run

    if machine is None:
        remedy = "give --machine FILE (docs/machines/h100-cluster.yaml is one)"
        raise UserError("needs the figures of a cluster", "--world", remedy)
    made = plan_cluster_run(run, machine_file=machine, world=world)
    return cluster_json(made) if as_json else cluster_text(made)


def _without_config(arguments: argparse.Namespace, words: list[str]) -> None:
    from megatrain.metrics.logger import RunLogger, quiet_libraries

    match arguments.command:
        case "init":
            from megatrain.commands.init import init_config, parse_columns

            init_config(arguments.model, arguments.data, arguments.out, columns=parse_columns(arguments.columns))
        case "monitor":
            from megatrain.commands.monitor import monitor

            monitor(arguments.run, every_s=arguments.every)
        case "plot":
            from megatrain.metrics.plot import plot_runs

            with RunLogger() as log:
                log.info("wrote " + " and ".join(map(str, plot_runs(arguments.runs, arguments.out, arguments.x))))
        case "generate":
            from megatrain.commands.generate import generate

            names = ("tokens", "temperature", "seed", "plain", "device", "trust_remote_code")
            generate(arguments.model, arguments.prompt, **_given(arguments, *names))
        case "export":
            from megatrain.checkpoint.export import export

            quiet_libraries()
            options = {"max_shard_bytes": arguments.max_shard_size, **_given(arguments, "dtype", "trust_remote_code")}
            with RunLogger() as log:
                export(arguments.checkpoint, arguments.out, **options, say=log.info)
        case "verify":
            from megatrain.checkpoint.export import verify

            quiet_libraries()
            with RunLogger() as log:
                verify(arguments.checkpoint, say=log.info)
        case "doctor":
            from megatrain.machine.doctor import doctor

            with RunLogger(stderr=True):
                found = doctor(arguments.device, again=arguments.again, form=arguments.form)
            _put_out(found)
        case "bench":
            work = _work(arguments)
            if _shape_on_several_ranks(work, arguments.gpus, words):
                return
            from megatrain.commands.bench import bench
            from megatrain.run.ranks import joined

            with joined(work.device), RunLogger(stderr=arguments.json, quiet=not work.is_main) as log:
                work = replace(work, say=log.info)
                report = bench(work, **_given(arguments, "steps", "warmup"), bounds=not arguments.no_bounds)
            if arguments.json and work.is_main:
                _put_out(json.dumps(asdict(report), indent=1))
        case "trace":
            work = _work(arguments)
            if _shape_on_several_ranks(work, arguments.gpus, words):
                return
            from megatrain.commands.trace import trace_shape
            from megatrain.run.ranks import joined

            with joined(work.device):
                trace_shape(work, **_given(arguments, "steps", "warmup", "out", "png", "save"))


def _shape_on_several_ranks(work: Work, gpus: int | None, words: list[str]) -> bool:
    """As `_on_several_ranks`, for steps of a shape; the shape is checked here, once."""
    from megatrain.commands.work import check_shape
    from megatrain.run.ranks import process_count, start_ranks

    count = process_count(gpus or "auto", work.device, "--gpus")
    if count == 1:
        return False
    check_shape(work.shape)
    if code := start_ranks(words, count, max_restarts=0):
        raise SystemExit(code)  # the ranks have said why
    return True


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in names}


def _say(text: str, stream: Any = None) -> None:
    """Print a command's error, or its result in text; everything else goes through the run logger."""
    print(printable(text), file=stream, flush=True)


def _put_out(text: str) -> None:
    """Print a result that has lines which are not indented: JSON, YAML, a table."""
    sys.stdout.write(visible(text) + "\n")
    sys.stdout.flush()


def _show_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own traceback of a bug, without what could steer the terminal."""
    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))


def _check_trace(arguments: argparse.Namespace, has_overrides: bool) -> None:
    """Raise unless the arguments name either a config or a shape, with their own options."""
    if arguments.shape is not None:
        if has_overrides or arguments.config is not None:
            remedy = "give RUN.yaml, or --shape with --rows and --tokens"
            raise UserError("trace --shape takes no config", "trace", remedy)
    elif arguments.config is None:
        raise UserError("trace needs RUN.yaml, or --shape", "trace")
    elif given := [name for name in SHAPE_OPTIONS if getattr(arguments, name) not in (None, [])]:
        remedy = "set the config key (run.device, batch.tokens_per_step, data.max_tokens, memory.device_gib, ...)"
        flag = f"--{given[0].replace('_', '-')}"
        raise UserError("is an option of --shape; a run takes it from its config", flag, remedy)


def _work(arguments: argparse.Namespace) -> Work:
    """Steps of a shape, for `bench` and `trace`."""
    from megatrain.machine.machine import read_figures

    if arguments.machine is not None:
        read_figures(arguments.machine)  # report a wrong file before the imports below, which take seconds
    from megatrain.commands.work import Work, plan_overrides
    from megatrain.engine.mesh.launch import world_size

    limits = _given(arguments, "device", "device_gib", "host_gib", "device_fraction")
    return Work(
        arguments.shape,
        arguments.rows or SHAPE_ROWS,
        arguments.tokens or SHAPE_TOKENS,
        machine_file=arguments.machine,
        overrides=plan_overrides(arguments.option),
        say=lambda text: None,
        ranks=world_size(),
        **{name: value for name, value in limits.items() if value is not None},
    )


def _config_file(given: str) -> Path:
    path = Path(given)
    if not path.is_dir():
        return path
    if (path / "config.json").is_file() and not (path / "config.yaml").exists():
        remedy = "give a run's YAML file; `eval` takes a model with --checkpoint"
        raise UserError("is the folder of a model, not of a run", given, remedy)
    return path / "config.yaml"


def _newest_checkpoint(given: Path) -> Path | None:
    """The newest complete checkpoint of the run's folder that `eval` was given, if it has one."""
    from megatrain.checkpoint.reader import latest_complete

    return latest_complete(given / "checkpoints") if (given / "checkpoints").is_dir() else None


def _unknown_argument(word: str, arguments: argparse.Namespace) -> UserError:
    """Suggests an option of the command, else a config key if the command takes keys."""
    from megatrain.config.load import suggest_key

    name, command = word.lstrip("-").partition("=")[0], arguments.command
    options = {option.replace("_", "-") for option in vars(arguments)} - {"command", "takes-keys"}
    near = difflib.get_close_matches(name.replace("_", "-"), options, n=1)
    suggestion = near[0] if near else None if command in WITHOUT_CONFIG else suggest_key(name)
    what = f"unknown argument {word!r}" + (f'; did you mean "--{suggestion}"?' if suggestion else "")
    see = f"{command} --help" if command in WITHOUT_CONFIG else f"{command} --help-all"
    return UserError(what, remedy=f"see `megatrain {see}`")

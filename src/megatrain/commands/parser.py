"""The words of the command line, and what `--help` says of them.

Commands that take a RUN.yaml take every key of it as an option too; those are no arguments here (see
`config.load.split_overrides`), but their help is: a short one with the keys that runs usually set, and one with all of them.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from megatrain.config.schema import ChangeName
from megatrain.units import parse_size

_ORDER = """
prepare a run
  init MODEL DATA      write a commented RUN.yaml for a model and some data, and check it
  data RUN.yaml        show what the data becomes: trained and masked tokens, lengths, rows, rejects
  check RUN.yaml       look at everything that a run needs, without training
  plan RUN.yaml        what goes where on the GPU, how a step is cut, and what that costs

train and watch
  train RUN.yaml       train a model and write checkpoints that transformers loads as they are
  monitor RUN          watch a run from its files
  plot RUN...          draw runs over each other, as a PNG and as one HTML file

use the result
  eval RUN             loss and perplexity on the held-out data
  generate RUN         let the model write something
  export RUN OUT       write a plain Hugging Face folder from a checkpoint
  verify RUN           compare every byte of a checkpoint with its checksum

know the machine
  doctor               measure this machine and say what is wrong with it
  bench --shape S      training steps of a shape, beside the plan and the compute bounds
  trace RUN.yaml       the timeline of some steps, for Chrome or Perfetto

RUN is the folder of a run. `megatrain COMMAND --help` says more; `megatrain train --help-all` explains every key of RUN.yaml.
"""
_KEYS = """
keys of RUN.yaml that runs usually set, each also an option here:
{keys}

--help-all explains every key, --help-all SECTION those of a section:
{sections}
"""
_ALL_KEYS = """\
Every key of RUN.yaml, in its order. Each is an option of the command line too; items of lists go by number:
--data.train.0.weight 0.5
"""


def parser() -> argparse.ArgumentParser:
    """Everything but the keys of a config."""
    from megatrain import __version__

    top = _Parser(
        prog="megatrain",
        description="Train Hugging Face language models far larger than the GPU's memory, in full fp32 precision.",
        epilog=_ORDER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="megatrain COMMAND ...",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"megatrain {__version__}")
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_Parser, prog="megatrain", help=argparse.SUPPRESS
    )
    _add_preparing(commands)
    _add_training(commands)
    _add_using(commands)
    _add_machine(commands)
    _add_trace(commands)
    return top


class _Parser(argparse.ArgumentParser):
    """Commands that take a config explain its keys behind their own options."""

    def format_help(self) -> str:
        text = super().format_help()
        if self.get_default("takes_keys"):
            from megatrain.config.docs import MAIN_KEYS, describe_keys, section_names

            sections = textwrap.fill(", ".join(section_names()), 100)
            text += _KEYS.format(keys=describe_keys(only=MAIN_KEYS), sections=sections)
        return text


class _HelpAll(argparse.Action):
    """`--help-all [SECTION]`: every key, or those of a section, and nothing else happens."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        from megatrain.config.docs import describe_keys, section_names

        if values is not None and values not in section_names():
            parser.error(f"argument --help-all: {values!r} is no section; use one of {', '.join(section_names())}")
        head = "" if values else _ALL_KEYS
        parser._print_message(f"{head}{describe_keys(section=values)}\n")
        parser.exit()


_Commands = argparse._SubParsersAction


def _command(commands: _Commands[_Parser], name: str, what: str) -> _Parser:
    return commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)


def _command_of_run(commands: _Commands[_Parser], name: str, what: str, many: str | None = None) -> _Parser:
    command = _command(commands, name, what)
    command.usage = f"megatrain {name} RUN.yaml [OPTION ...] [--section.key VALUE ...]"
    command.add_argument("config", metavar="RUN.yaml", nargs=many, help="the run's config, or the folder of a run")
    command.add_argument(
        "--help-all",
        action=_HelpAll,
        nargs="?",
        metavar="SECTION",
        help="explain every key of RUN.yaml, or those of a section",
    )
    command.set_defaults(takes_keys=True)
    return command


def _add_preparing(commands: _Commands[_Parser]) -> None:
    init = _command(commands, "init", "write a commented RUN.yaml for a model and some data, and check it")
    init.add_argument("model", metavar="MODEL", help="Hugging Face model folder, or a hub id in the local cache")
    init.add_argument(
        "data",
        metavar="DATA",
        nargs="+",
        help="files, folders, globs, or ids of data sets in the local cache of the hub",
    )
    init.add_argument(
        "--out", metavar="FILE", type=Path, default=Path("run.yaml"), help="the file to write (default: run.yaml)"
    )
    init.add_argument(
        "--columns",
        metavar="NAME=COLUMN",
        nargs="+",
        default=[],
        help="the format's column names and the data's, where they differ: instruction=question output=answer",
    )
    data = _command_of_run(
        commands, "data", "show what the data becomes: trained and masked tokens, lengths, rows, rejects"
    )
    data.add_argument("--samples", metavar="N", type=_positive, default=3, help="samples shown of each source (3)")
    data.add_argument("--tokens", metavar="N", type=_positive, default=400, help="tokens shown of each sample (400)")
    check = _command_of_run(commands, "check", "look at everything that a run needs, without training")
    _add_resume(check)
    plan = _command_of_run(
        commands, "plan", "what goes where, how a step is cut, and what that costs, before anything is allocated"
    )
    plan.add_argument("--machine", metavar="FILE", help="plan for the machine in this file (see docs/machines)")
    plan.add_argument(
        "--world",
        metavar="N",
        type=_positive,
        help="rank the layouts of N GPUs (engine: mesh); --machine is a cluster's file",
    )
    plan.add_argument("--json", action="store_true", help="as JSON")


def _add_training(commands: _Commands[_Parser]) -> None:
    train = _command_of_run(
        commands, "train", "train a model and write checkpoints that transformers loads as they are"
    )
    _add_resume(train)
    monitor = _command(commands, "monitor", "watch a run from its files")
    monitor.add_argument("run", metavar="RUN", type=Path, help="the folder of the run")
    monitor.add_argument(
        "--every", metavar="N", type=_positive, default=2, help="seconds between two looks at the files (2)"
    )
    plot = _command(commands, "plot", "draw runs over each other, as a PNG and as one HTML file")
    plot.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="the folder of a run, or its metrics.jsonl")
    plot.add_argument(
        "--out", metavar="NAME", type=Path, default=Path("plot"), help="files to write, without suffix (default: plot)"
    )
    plot.add_argument(
        "--x", choices=("step", "tokens", "hours"), default="step", help="what is drawn to the right (step)"
    )


def _add_resume(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--resume",
        metavar="auto|latest|PATH",
        help="auto: go on from the newest complete checkpoint, or start if there is none; latest: go on or fail; "
        "or a checkpoint's folder",
    )
    command.add_argument(
        "--allow-changes",
        metavar="NAME,...",
        type=_changes,
        default=(),
        help="with --resume: go on although these differ from the checkpoint's run: data, batch (tokens per step), seed, "
        "schedule (past learning rates), optim, precision",
    )


def _add_trace(commands: _Commands[_Parser]) -> None:
    trace = _command_of_run(
        commands, "trace", "the timeline of some steps, for Chrome or Perfetto; of a run, or of a --shape", many="?"
    )
    assert trace.usage is not None
    trace.usage += "\n       megatrain trace --shape SHAPE [OPTION ...]"
    trace.add_argument("--steps", type=_positive, default=3, metavar="N", help="steps in the trace (3)")
    trace.add_argument("--warmup", type=_positive, default=2, metavar="N", help="steps before them (2)")
    trace.add_argument("--out", type=Path, default=Path("trace.json"), metavar="FILE", help="the trace (trace.json)")
    trace.add_argument("--png", type=Path, metavar="FILE", help="a picture of it, too")
    trace.add_argument("--save", action="store_true", help="write a checkpoint under the traced steps, and remove it")
    _add_shape(trace, required=False)


def _add_using(commands: _Commands[_Parser]) -> None:
    evaluate = _command_of_run(commands, "eval", "loss and perplexity on the held-out data (data.val)")
    evaluate.add_argument(
        "--checkpoint",
        metavar="PATH",
        type=Path,
        help="a checkpoint's folder, or any model folder; default: the newest checkpoint of a run's folder, model.path of a YAML",
    )
    generate = _command(commands, "generate", "let a model write something, with plain transformers, for a quick look")
    generate.add_argument(
        "model",
        metavar="MODEL",
        type=Path,
        help="a run's folder (its newest checkpoint), a checkpoint's, or any model's",
    )
    generate.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        required=True,
        help="what it answers or goes on with; may come again",
    )
    generate.add_argument("--tokens", metavar="N", type=_positive, default=128, help="most tokens of an answer (128)")
    generate.add_argument(
        "--temperature", metavar="X", type=_temperature, default=0.0, help="0: the likeliest token always (0)"
    )
    generate.add_argument("--seed", metavar="N", type=int, default=0, help="of the draws, with a temperature (0)")
    generate.add_argument(
        "--plain", action="store_true", help="go on with the prompt as it is, although the model has a chat template"
    )
    generate.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one"
    )
    export = _command(
        commands,
        "export",
        "write a plain Hugging Face folder from a checkpoint, and prove that it loads and computes the same",
    )
    verify = _command(
        commands, "verify", "compare every byte of a checkpoint with its checksum, and name what is damaged"
    )
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
    export.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=_size,
        default="50GB",
        help="of a weight file, like 5GB or 500MB (50GB)",
    )
    for command in (generate, export):
        command.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")


def _add_machine(commands: _Commands[_Parser]) -> None:
    doctor = _command(commands, "doctor", "measure this machine and say what is wrong with it")
    doctor.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    doctor.add_argument("--again", action="store_true", help="measure again, whatever is in the cache")
    form = doctor.add_mutually_exclusive_group()
    form.add_argument("--json", dest="form", action="store_const", const="json", help="the figures as JSON")
    form.add_argument("--yaml", dest="form", action="store_const", const="yaml", help="the figures as a machine file")
    doctor.set_defaults(form="text")
    bench = _command(
        commands, "bench", "training steps with random weights and tokens, beside the plan and the compute bounds"
    )
    _add_shape(bench, required=True)
    bench.add_argument("--steps", type=_positive, default=6, metavar="N", help="steps that count (6)")
    bench.add_argument("--warmup", type=_positive, default=2, metavar="N", help="steps before them (2, and at least 2)")
    bench.add_argument("--no-bounds", action="store_true", help="leave the compute bounds out")
    bench.add_argument("--json", action="store_true", help="the report as JSON on stdout, everything else on stderr")


SHAPE_ROWS, SHAPE_TOKENS = 8, 1024
"""Of a step of a shape, where they need not be given."""
OF_A_SHAPE = ("rows", "tokens", "device", "device_gib", "device_fraction", "host_gib", "machine", "option")
"""What `_add_shape` adds beside the shape itself. None of it has a default, so that it is seen whether one was given."""


def _add_shape(command: argparse._ActionsContainer, required: bool) -> None:
    """The arguments that say which shape runs where."""
    if not required:
        command = command.add_argument_group("options of a --shape, whose steps have random weights and tokens")
    command.add_argument("--shape", required=required, help="qwen3-0.6b, -4b, -8b, -14b, ..., tiny, or a model folder")
    for name, default, what in (
        ("--rows", SHAPE_ROWS, "rows of a step"),
        ("--tokens", SHAPE_TOKENS, "tokens of a row"),
    ):
        about = what if required else f"{what} ({default})"
        command.add_argument(name, type=_positive, required=required, metavar="N", help=about)
    command.add_argument("--device", help="auto, cpu, cuda or cuda:N (auto)")
    command.add_argument("--device-gib", type=float, metavar="X", help="device memory that may be used")
    command.add_argument("--device-fraction", type=float, metavar="X", help="share of it that the plan may fill (0.92)")
    command.add_argument("--host-gib", type=float, metavar="X", help="host memory that may be used")
    command.add_argument("--machine", metavar="FILE", help="plan with these figures instead of measuring")
    command.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of HostEngine, instead of the plan's"
    )


def _positive(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"should be a number from 1, found {word!r}")
    return int(word)


def _temperature(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"should be a number from 0, found {word!r}")
    return value


def _size(word: str) -> int:
    try:
        return parse_size(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _changes(word: str) -> Sequence[ChangeName]:
    known: tuple[ChangeName, ...] = get_args(ChangeName)
    if unknown := [name for name in word.split(",") if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return tuple(name for name in known if name in word.split(","))

"""The command line's arguments and help texts.

Commands that take a RUN.yaml also accept every config key as an option. Those options are not defined here (see
`config.load.split_overrides`), but the help lists them: the usual ones with `--help`, all of them with `--help-all`.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from megatrain.config.schema import ChangeName
from megatrain.text import visible
from megatrain.units import DTYPE_NAMES, parse_size

_DESCRIPTION = """\
Train Hugging Face language models larger than GPU memory. Master weights and optimizer state stay in host memory in fp32
precision, and layers stream through the GPU. Begin with `megatrain init MODEL DATA`, then `megatrain train run.yaml`."""
_COMMANDS = """
prepare a run
  init MODEL DATA      write a commented run.yaml for a model and data, and check it
  data RUN.yaml        show the data as the model sees it: trained tokens, lengths, rows, rejected samples
  check RUN.yaml       check everything that training needs, without training
  plan RUN.yaml        show memory use, placement and estimated speed, without allocating anything

train and watch
  train RUN.yaml       train, and write checkpoints that transformers can load
  monitor RUN          watch a run live in the terminal, from its files
  plot RUN...          plot one or several runs, as PNG and HTML

use the result
  eval RUN             compute loss and perplexity on the held-out data
  generate RUN         generate text with the trained model, for a quick look
  export RUN OUT       write a checkpoint as a plain Hugging Face folder, and verify that it computes the same
  verify RUN           verify all checksums of a checkpoint, and name damaged files

know the machine
  doctor               measure this machine, and report what slows training down
  bench --shape S      time training steps of a model shape, beside the plan and the compute bounds
  trace RUN.yaml       record a timeline of some steps of a run or of a --shape, for Chrome or Perfetto

RUN is the folder of a run, RUN.yaml its config. `megatrain COMMAND --help` describes a command, `megatrain train --help-all` all
config keys.
"""
_SUMMARIES = dict(re.findall(r"^  (\w+).*?  +(.+)$", _COMMANDS, flags=re.MULTILINE))
_KEYS = """
usual config keys, each also an option:
{keys}

--help-all describes all keys, --help-all SECTION those of one section:
{sections}
"""
_ALL_KEYS = """\
All config keys, in YAML order. Each is also a command line option; list items are addressed by index:
--data.train.0.weight 0.5
"""


def parser() -> argparse.ArgumentParser:
    """All commands and their arguments, except config keys."""
    from megatrain import __version__

    raw, usage = argparse.RawDescriptionHelpFormatter, "megatrain COMMAND ..."
    top = _Parser("megatrain", usage, _DESCRIPTION, _COMMANDS, formatter_class=raw, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"megatrain {__version__}")
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=_Parser, prog="megatrain", help=argparse.SUPPRESS
    )
    _add_preparing(commands)
    _add_training(commands)
    _add_using(commands)
    _add_machine(commands)
    return top


class _Parser(argparse.ArgumentParser):
    """Appends the usual config keys to the help of commands that take a config."""

    def format_help(self) -> str:
        text = super().format_help()
        if self.get_default("takes_keys"):
            from megatrain.config.docs import MAIN_KEYS, describe_keys, section_names

            sections = textwrap.fill(", ".join(section_names()), 100)
            text += _KEYS.format(keys=describe_keys(only=MAIN_KEYS), sections=sections)
        return text

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(visible(message), file)


class _HelpAll(argparse.Action):
    """`--help-all [SECTION]`: print all keys, or those of a section, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        from megatrain.config.docs import describe_keys, section_names

        if values is not None and values not in section_names():
            parser.error(f"argument --help-all: {values!r} is not a section; use one of {', '.join(section_names())}")
        head = "" if values else _ALL_KEYS
        parser._print_message(f"{head}{describe_keys(section=values)}\n", sys.stdout)
        parser.exit()


_Commands = argparse._SubParsersAction


def _command(commands: _Commands[_Parser], name: str) -> _Parser:
    what = _SUMMARIES[name]
    command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)
    command.add_argument("--verbose", action="store_true", help="also print details, and the warnings of libraries")
    return command


def _command_with_config(commands: _Commands[_Parser], name: str, nargs: str | None = None) -> _Parser:
    command = _command(commands, name)
    command.usage = f"megatrain {name} RUN.yaml [OPTION ...] [--section.key VALUE ...]"
    command.add_argument("config", metavar="RUN.yaml", nargs=nargs, help="config file, or the folder of a run")
    what = "describe all config keys, or those of one section"
    command.add_argument("--help-all", action=_HelpAll, nargs="?", metavar="SECTION", help=what)
    command.set_defaults(takes_keys=True)
    return command


def _add_number(
    command: argparse._ActionsContainer, flag: str, default: int, what: str, parse: Callable[[str], int] | None = None
) -> None:
    text = f"{what} (default: {default})"
    command.add_argument(flag, metavar="N", type=parse or _positive, default=default, help=text)


def _add_preparing(commands: _Commands[_Parser]) -> None:
    add = _command(commands, "init").add_argument
    add("model", metavar="MODEL", help="Hugging Face model folder, or a hub id in the local cache")
    add("data", metavar="DATA", nargs="+", help="files, folders, globs, or ids of cached Hugging Face datasets")
    add("--out", metavar="FILE", type=Path, default=Path("run.yaml"), help="file to write (default: run.yaml)")
    columns = "map the format's column names to the data's, where they differ: instruction=question output=answer"
    add("--columns", metavar="NAME=COLUMN", nargs="+", default=[], help=columns)
    data = _command_with_config(commands, "data")
    _add_number(data, "--samples", 3, "samples to show of each source")
    _add_number(data, "--tokens", 400, "tokens to show of each sample")
    _add_resume(_command_with_config(commands, "check"))
    add = _command_with_config(commands, "plan").add_argument
    add("--machine", metavar="FILE", help="plan for the machine described in FILE (see docs/machines)")
    world = "rank the parallel layouts for N GPUs (engine: mesh); needs --machine with a cluster file"
    add("--world", metavar="N", type=_positive, help=world)
    add("--json", action="store_true", help="print JSON")


def _add_training(commands: _Commands[_Parser]) -> None:
    _add_resume(_command_with_config(commands, "train"))
    monitor = _command(commands, "monitor")
    monitor.add_argument("run", metavar="RUN", type=Path, help="folder of the run")
    _add_number(monitor, "--every", 2, "seconds between updates")
    add = _command(commands, "plot").add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or a metrics.jsonl")
    add("--out", metavar="NAME", type=Path, default=Path("plot"), help="output files without suffix (default: plot)")
    add("--x", choices=("step", "tokens", "hours"), default="step", help="horizontal axis (default: step)")


def _add_resume(command: argparse.ArgumentParser) -> None:
    resume = (
        "auto: resume from the newest complete checkpoint, or start if there is none; latest: resume or fail; PATH: a "
        "checkpoint folder"
    )
    command.add_argument("--resume", metavar="auto|latest|PATH", help=resume)
    changes = (
        "with --resume: accept these differences from the checkpoint's run: data, batch (tokens per step), seed, "
        "schedule (learning rates of past steps), optim, precision"
    )
    command.add_argument("--allow-changes", metavar="NAME,...", type=_changes, default=(), help=changes)


def _add_using(commands: _Commands[_Parser]) -> None:
    which = "checkpoint or model folder; default: the run's newest checkpoint, or model.path of a RUN.yaml"
    _command_with_config(commands, "eval").add_argument("--checkpoint", metavar="PATH", type=Path, help=which)
    generate = _command(commands, "generate")
    add = generate.add_argument
    add("model", metavar="MODEL", type=Path, help="folder of a run (its newest checkpoint), a checkpoint or a model")
    add("--prompt", metavar="TEXT", action="append", required=True, help="prompt; may be given several times")
    _add_number(generate, "--tokens", 128, "maximum new tokens per prompt")
    sampling = "sampling temperature; 0: always the most likely token (default: 0)"
    add("--temperature", metavar="X", type=_temperature, default=0.0, help=sampling)
    _add_number(generate, "--seed", 0, "seed of the sampling", parse=int)
    add("--plain", action="store_true", help="continue the prompt as is, without the chat template")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if available")
    export = _command(commands, "export")
    verify = _command(commands, "verify")
    which = "folder of a checkpoint, or of a run (its newest checkpoint)"
    for command in (export, verify):
        command.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", type=Path, help=which)
    add = export.add_argument
    add("out", metavar="OUT", type=Path, help="folder to create")
    add("--dtype", choices=DTYPE_NAMES, help="dtype of the weights; default: that of the original model")
    limit = "maximum size of a weight file, like 5GB or 500MB (default: 50GB)"
    add("--max-shard-size", metavar="SIZE", type=_size, default="50GB", help=limit)
    for command in (generate, export):
        command.add_argument("--trust-remote-code", action="store_true", help="run Python code from the model folder")


def _add_machine(commands: _Commands[_Parser]) -> None:
    doctor = _command(commands, "doctor")
    doctor.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    doctor.add_argument("--again", action="store_true", help="measure again instead of using cached figures")
    form = doctor.add_mutually_exclusive_group()
    form.add_argument("--json", dest="form", action="store_const", const="json", help="print the figures as JSON")
    form.add_argument("--yaml", dest="form", action="store_const", const="yaml", help="print them as a machine file")
    doctor.set_defaults(form="text")
    bench = _command(commands, "bench")
    _add_shape(bench, required=True)
    _add_number(bench, "--steps", 6, "measured steps")
    _add_number(bench, "--warmup", 2, "steps before them, at least 2")
    bench.add_argument("--no-bounds", action="store_true", help="skip the compute bounds")
    bench.add_argument("--json", action="store_true", help="print the report as JSON to stdout, all else to stderr")
    trace = _command_with_config(commands, "trace", nargs="?")
    assert trace.usage is not None
    trace.usage += "\n       megatrain trace --shape SHAPE [OPTION ...]"
    _add_number(trace, "--steps", 3, "steps to record")
    _add_number(trace, "--warmup", 2, "steps before them")
    out = Path("trace.json")
    trace.add_argument("--out", type=Path, default=out, metavar="FILE", help=f"trace file (default: {out})")
    trace.add_argument("--png", type=Path, metavar="FILE", help="also draw the trace")
    trace.add_argument("--save", action="store_true", help="record a save too; its checkpoint is removed afterwards")
    _add_shape(trace, required=False)


SHAPE_ROWS, SHAPE_TOKENS = 8, 1024
"""Defaults for a --shape."""
SHAPE_OPTIONS = ("gpus", "rows", "tokens", "device", "device_gib", "device_fraction", "host_gib", "machine", "option")
"""What `_add_shape` adds beside --shape. None of them has a default, so that it shows whether one was given."""


def _add_shape(command: argparse._ActionsContainer, required: bool) -> None:
    """The arguments of commands that run steps of a model shape."""
    if not required:
        command = command.add_argument_group("options with --shape, whose steps use random weights and tokens")
    add = command.add_argument
    add("--shape", required=required, help="qwen3-0.6b, -4b, -8b, -14b, ..., tiny, or a model folder")
    rows, tokens = ("", "") if required else (f" (default: {SHAPE_ROWS})", f" (default: {SHAPE_TOKENS})")
    add("--rows", type=_positive, required=required, metavar="N", help=f"rows per step{rows}")
    add("--tokens", type=_positive, required=required, metavar="N", help=f"tokens per row{tokens}")
    add("--device", help="auto, cpu, cuda or cuda:N (default: auto)")
    gpus = "processes, one for each GPU, that share the model's state (default: all visible GPUs; 1 on a CPU)"
    add("--gpus", type=_positive, metavar="N", help=gpus)
    add("--device-gib", type=float, metavar="X", help="limit on device memory [GiB]")
    add(
        "--device-fraction",
        type=float,
        metavar="X",
        help="share of it that the plan may fill (default: auto)",
    )
    add("--host-gib", type=float, metavar="X", help="limit on host memory [GiB]")
    add("--machine", metavar="FILE", help="plan with the figures in FILE instead of measuring")
    instead = "set an option of the engine, instead of the plan's choice"
    add("--option", action="append", default=[], metavar="NAME=VALUE", help=instead)


def _positive(word: str) -> int:
    if not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"should be an integer of at least 1, found {word!r}")
    return int(word)


def _temperature(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"should be a number of at least 0, found {word!r}")
    return value


def _size(word: str) -> int:
    try:
        return parse_size(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _changes(word: str) -> Sequence[ChangeName]:
    known: tuple[ChangeName, ...] = get_args(ChangeName)
    if unknown := [name for name in word.split(",") if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return tuple(name for name in known if name in word.split(","))

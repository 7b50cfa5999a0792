"""The command line: `megatrain train|check|data|eval RUN.yaml [--section.key value ...]`, and commands of their own form.

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
    if arguments.command == "init":
        if overrides:
            raise UserError("init takes no keys", overrides[0].flag, "change them in the file that it writes")
        from megatrain.init_config import init_config

        init_config(arguments.model, arguments.data, arguments.out)
        return 0
    run = load_config(_config_file(arguments.config), [f"{override.flag}={override.text}" for override in overrides])
    match arguments.command:
        case "train":
            from megatrain.train import train

            train(run, resume=arguments.resume, allow_changes=arguments.allow_changes)
        case "check":
            from megatrain.check import check

            check(run, resume=arguments.resume)
        case "eval":
            from megatrain.evaluate import evaluate_run

            evaluate_run(run, checkpoint=arguments.checkpoint)
        case "data":
            from megatrain.inspect_data import inspect_data

            inspect_data(run, samples=arguments.samples, most_tokens=arguments.tokens)
    return 0


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
        help="a checkpoint's folder, or any model folder; default: model.path",
    )
    data = _command(commands, "data", "show what the data becomes: trained and masked tokens, lengths, rows, rejects")
    data.add_argument("--samples", metavar="N", type=_positive, default=3, help="samples shown of each source (3)")
    data.add_argument("--tokens", metavar="N", type=_positive, default=400, help="tokens shown of each sample (400)")
    return parser


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


def _command(commands: argparse._SubParsersAction[_Parser], name: str, what: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False, usage=None
    )
    command.add_argument("config", metavar="RUN.yaml", help="the run's config, or the folder of a run")
    command.set_defaults(describe_keys=True)
    return command


def _config_file(given: str) -> Path:
    path = Path(given)
    return path / "config.yaml" if path.is_dir() else path


def _unknown_argument(word: str) -> UserError:
    from megatrain.config.load import suggest_key

    key = word.lstrip("-").partition("=")[0]
    suggestion = suggest_key(key)
    return UserError(
        f"unknown argument {word!r}" + (f'; did you mean "--{suggestion}"?' if suggestion else ""),
        remedy="see `megatrain train --help`",
    )

"""Words on a command line -> a table, a progress bar or one JSON object; status 0 done, 1 failed, 2 wrong input."""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys
from collections.abc import Callable
from typing import NoReturn

from engine.asking.rules import SpecError, closest
from engine.asking.values import type_of
from engine.cli import commands
from engine.spec import Spec


def _first_line(function: Callable) -> str | None:
    """Of its docstring, which `python -OO` leaves out."""
    return function.__doc__.splitlines()[0] if function.__doc__ else None


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everywhere in Lockstep."""

    def error(self, message: str) -> NoReturn:
        raise SpecError("command_line", "command", message)


def parser() -> Parser:
    top = Parser(prog="python -m engine", description="Predict and run how a model is trained on many devices.")
    commands_ = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, function in commands.COMMANDS.items():
        sub = commands_.add_parser(name, help=_first_line(function), allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON object, in seconds and bytes")
        if name in ("simulate", "search", "run"):
            _add_settings(sub)
        if name in ("run", "runs", "show", "export"):
            sub.add_argument("--runs-dir", help="the folder of runs (default: runs)")
        if name == "deal":
            sub.add_argument("--samples", default="13", help="how many there are (default: 13)")
            sub.add_argument("--devices", default="3", help="ranks that share them (default: 3)")
            sub.add_argument("--batch", default="2", help="samples in a rank's batch (default: 2)")
            sub.add_argument("--wrong", default="", help="samples that the model gets wrong, as 0,1")
        if name == "validate":
            sub.add_argument("file", help="measurements as JSON: entries with what was run and its metrics")
            sub.add_argument("--rows", action="store_true", help="list every row: measured, predicted, or why not used")
            sub.add_argument("--save", help="a file to keep the report and its rows in, for the page of the app")
        if name in ("show", "export"):
            sub.add_argument("run_id", help="a run's id, or 'last'")
        if name == "show":
            sub.add_argument("--plan", action="store_true", help="print what every rank was planned to do")
        if name == "calibrate":
            sub.add_argument("--quick", action="store_true", help="measure less, and less exactly: for tests")
        if name == "export":
            sub.add_argument("--format", default="perfetto", help=", ".join(commands.FORMATS))
            sub.add_argument("--output", help="the file to write (default: RUN_ID and the format's ending)")
            sub.add_argument("--language", default="en", help="of the HTML page: en, zh")
        if name == "stragglers":
            sub.add_argument("traces", nargs="+", help="files of PyTorch's profiler, .json or .json.gz, one a rank")
        if name == "search":
            sub.add_argument(
                "--top", default="10", help="how many layouts are shown, each of another mesh (default: 10)"
            )
        if name == "simulate":
            sub.add_argument("--plan", action="store_true", help="print the plan, op by op, instead of its numbers")
    return top


def _add_settings(sub: Parser) -> None:
    sub.add_argument("--spec", help="a JSON file with settings; options given beside it win")
    for f in dataclasses.fields(Spec):
        choices = f.metadata["choices"]
        text = f.metadata["help"] + (f": {', '.join(choices)}" if choices else "")
        default = f" (default: {f.default})" if f.default is not None else ""
        option = "--" + f.name.replace("_", "-")
        metavar = type_of(f)[0].__name__.upper() if not choices else f.name.upper()
        sub.add_argument(option, dest="set_" + f.name, help=text.replace("%", "%%") + default, metavar=metavar)


def _check_words(words: list[str]) -> None:
    """A misspelt option is answered with the ones most like it, which argparse does not do."""
    known = {"--" + f.name.replace("_", "-") for f in dataclasses.fields(Spec)}
    known |= {"--json", "--spec", "--runs-dir", "--format", "--output", "--plan", "--language", "--help"}
    known |= {"--samples", "--batch", "--wrong", "--rows", "--quick", "--save", "--top"}
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and len(name) > 2 and name not in known:
            raise SpecError("unknown_setting", name, name, suggest=closest(name, known))


def main(words: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # where a terminal has no × or µ, their numbers are printed
            stream.reconfigure(errors="backslashreplace")
    try:
        if not words:
            parser().print_help()
            return 2
        _check_words(words)
        arguments = parser().parse_args(words)
        status = commands.COMMANDS[arguments.command](arguments)
        print(end="", flush=True)  # here, where it is told when there is no room for it
        return status
    except SpecError as error:
        print(f"error: {error}".replace("\n", " "), file=sys.stderr)
        if error.picture:
            print(error.picture, file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left, as `head` does; nobody is there to be told
        return 1
    except OSError as error:  # no room on the disk, or no permission
        print(f"error: {error}", file=sys.stderr)
        sys.stdout = None  # what is left to be printed could not be either
        return 1

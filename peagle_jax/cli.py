"""The `peagle` command: wires the subcommands, turns bad input into one line and exit code 2."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from types import FrameType
from typing import Any, NoReturn, TextIO

from peagle_jax.commands import COMMANDS
from peagle_jax.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, InputError, exit_code

INTERRUPTED = "peagle: interrupted"


class _Version(argparse.Action):
    """`--version`, read from the installed package only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"peagle {metadata.version('peagle-jax')}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Answers a command line that it does not understand in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line: a subparser for each of `peagle_jax.commands`."""
    parser = _Parser(
        prog="peagle",
        description="Lossless P-EAGLE speculative decoding in JAX.",
    )
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"peagle_jax.commands.{name}")
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"peagle: warning: {message}", file=sys.stderr)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0 done; 1 an internal fault (with its traceback); 2 bad input, in one line on stderr;
    130 interrupted; 141 the reader of stdout went away. argparse exits by itself, with 2
    for a command line that it does not understand.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return _run(argv)
        except BrokenPipeError as error:
            # Python flushes stdout once more at exit; that one must find somewhere to write.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return exit_code(error)
        except (InputError, OSError) as error:
            print(f"peagle: error: {_one_line(error)}", file=sys.stderr)
            return exit_code(error)
        except KeyboardInterrupt as error:
            print(INTERRUPTED, file=sys.stderr)
            return exit_code(error)


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
    finally:
        sys.stdout.flush()  # here, where a broken pipe can still be answered
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt, but at once the end where a module is loading: jax's libraries answer
    an exception there with an error of their own or a crash, or lose it."""
    at = frame
    while at is not None:
        if at.f_code.co_filename.startswith("<frozen importlib"):
            sys.stderr.write(f"{INTERRUPTED}\n")
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)
        at = at.f_back
    signal.default_int_handler(number, frame)


def command() -> NoReturn:
    """`main` as the program that it is."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
        signal.signal(signal.SIGINT, _interrupt)
    code = main()
    if code == EXIT_INTERRUPTED:
        # Threads of XLA may still compile; torn down beneath them the interpreter would crash.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    command()

"""The one exception for bad input: raised before compilation, shown as one line. And the exit
codes of commands."""

from __future__ import annotations

EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 128 + 2  # SIGINT, as shells report it
EXIT_BROKEN_PIPE = 128 + 13  # SIGPIPE


class InputError(ValueError):
    """Something the user gave is wrong. The message is one line: file, key, found, expected.

    The command line prints it without a traceback and exits with code 2.
    """


def exit_code(error: BaseException) -> int:
    """The exit code of a command that an exception ended."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FAULT
    for kind, code in (
        (BrokenPipeError, EXIT_BROKEN_PIPE),  # an OSError too
        ((InputError, OSError), EXIT_BAD_INPUT),
        (KeyboardInterrupt, EXIT_INTERRUPTED),
    ):
        if isinstance(error, kind):
            return code
    return EXIT_FAULT

"""The one exception for bad input: raised before compilation, shown as one line."""

from __future__ import annotations


class InputError(ValueError):
    """Something the user gave is wrong. The message is one line: file, key, found, expected.

    The command line prints it without a traceback and exits with code 2.
    """

"""What all peer programs share: a loop over requests on standard input.

A request is a line of JSON, `{"call": "prepare" | "run", ...case}`; the answer is a line too:
the handler's result, or `{"error": text}`. The peer's own prints go to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(setup: Callable[[dict[str, Any]], dict[str, Callable[[dict[str, Any]], Any]]]) -> None:
    """Answers until standard input ends. The first line is what `setup` gets; it returns the
    handlers by name."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    handlers: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["call"] == "setup":
                handlers = setup(request)
                result: Any = {}
            else:
                result = handlers[request["call"]](request)
        except Exception as error:  # whatever a peer raises is an answer, not this loop's end
            result = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(result) + "\n")
        answers.flush()

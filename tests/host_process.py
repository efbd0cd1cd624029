"""`peagle batch` as one process of several: run by test_hosts.py in processes of its own.

    python -m tests.host_process SECONDS DIE_AFTER peagle-arguments

Every answer takes SECONDS more, so that a run lasts; after DIE_AFTER answers the process is
killed (0 = never). Processes are missed after 15 seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from peagle_jax import cli, hosts
from peagle_jax.serving.batch import BatchRun


def main(seconds: float, die_after: int, arguments: list[str]) -> int:
    hosts.HEARTBEAT_SECONDS = 15
    finish, answered = BatchRun._finish, [0]

    def slow_finish(self: Any, end: Any) -> None:
        finish(self, end)
        time.sleep(seconds)
        answered[0] += 1
        if answered[0] == die_after:
            self._results.commit()
            os.kill(os.getpid(), signal.SIGKILL)

    BatchRun._finish = slow_finish  # type: ignore[method-assign]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))

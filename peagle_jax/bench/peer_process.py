"""A peer in a process of its own: started once, asked by lines of JSON, idle while others run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from peagle_jax.bench.cases import Case, Parts, Run
from peagle_jax.bench.session import EngineError

PROGRAMS = Path(__file__).resolve().parent / "peers"


@dataclasses.dataclass(frozen=True)
class PeerSettings:
    """What every peer is told before its first case.

    source: the target's file or folder as the user has it.
    target, drafters: folders in the Hugging Face and vLLM layouts; drafters by method.
    prompts: token ids. threads: for matrix products.
    """

    source: str
    target: str
    drafters: dict[str, str]
    dtype: str
    prompts: list[list[int]]
    max_new_tokens: int
    max_model_len: int
    eos_token_ids: list[int]
    threads: int


class PeerProcess:
    """An engine of `session.measure` that asks a program of peers/."""

    def __init__(self, peer: str, settings: PeerSettings, log: IO[str], python: str | None) -> None:
        """log: where the program's own output goes. python: its interpreter, None = this one."""
        self._peer = peer
        self._program = subprocess.Popen(
            [python or sys.executable, str(PROGRAMS / f"{peer.replace('.', '_')}.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            self._ask("setup", dataclasses.asdict(settings))
        except EngineError:
            self.close()
            raise

    def prepare(self, case: Case) -> float:
        """The engine loaded and warm; seconds that it took to load."""
        return float(self._ask("prepare", dataclasses.asdict(case))["compile_seconds"])

    def run(self, case: Case) -> Run:
        """All prompts once, timed by the peer's process."""
        found = self._ask("run", dataclasses.asdict(case))
        return Run(
            found["token_ids"],
            found["seconds"],
            int(found.get("drafts", 0)),
            tuple(int(count) for count in found.get("accepted_per_position", ())),
        )

    def parts(self, case: Case) -> Parts | None:
        """Not known of other engines."""
        return None

    def close(self) -> None:
        """Ends the program."""
        self._program.terminate()
        self._program.wait()
        for stream in (self._program.stdin, self._program.stdout):
            if stream is not None:
                # What was not sent to a program that has ended is not missed.
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _ask(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        try:
            self._program.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            self._program.stdin.flush()
            line = self._program.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._program.wait()
            raise EngineError(f"{self._peer}: its process ended with exit code {code}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self._peer}: {answer['error']}")
        return answer

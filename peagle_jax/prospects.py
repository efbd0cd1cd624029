"""Whether a new sequence should draft, from what those before it have shown. No jax.

Where drafts do not pay, sequences come without a drafter, and cost what they cost in plain
decoding. Then nothing more is learnt of drafts; so every so many steps they are tried once more.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

# Steps without a sequence that drafts, until it is tried again.
STEPS_UNTIL_TRIED = 2000


@runtime_checkable
class Decoder(Protocol):
    """What decodes and tells how drafts did."""

    @property
    def worth_drafting(self) -> bool:
        """Whether new sequences should have a drafter, by the acceptance seen."""

    @property
    def worth_trying(self) -> bool:
        """Whether they should if their drafts were good."""


class Prospects:
    """What is asked before a sequence begins."""

    def __init__(self, decoder: Decoder, num_tries: int) -> None:
        """num_tries: how many sequences try again together."""
        self._decoder, self._num_tries = decoder, num_tries
        self._steps_without = self._tries = 0

    def stepped(self, num_steps: int, drafts: bool) -> None:
        """So many steps were asked for, and whether any sequence had a drafter."""
        self._steps_without = 0 if drafts else self._steps_without + num_steps
        if self._steps_without >= STEPS_UNTIL_TRIED:
            self._steps_without, self._tries = 0, self._num_tries

    def of_next(self) -> tuple[bool, bool]:
        """Of the next sequence: whether it has a drafter, and whether what was found of drafts is
        forgotten."""
        if self._tries and self._decoder.worth_trying:
            self._tries -= 1
            return True, True
        return self._decoder.worth_drafting, False

"""Whether a new sequence should draft, from what those before it have shown. No jax.

Where drafts do not pay, sequences come without a drafter, and cost what they cost in plain
decoding. Then nothing more is learnt of drafts; so every so many steps they are tried once more.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

# Steps without a sequence that drafts, until it is tried again.
STEPS_UNTIL_TRIED = 2000


@runtime_checkable
class Experience(Protocol):
    """What tells how drafts did so far, and might do."""

    @property
    def worth_drafting(self) -> bool:
        """Whether new sequences should draft, by what results have told so far."""

    @property
    def worth_trying(self) -> bool:
        """Whether drafting may pay at all, by what steps cost."""


class Prospects:
    """What is asked before a sequence begins."""

    def __init__(self, experience: Experience, num_tries: int) -> None:
        """num_tries: how many sequences try again together."""
        self._experience, self._num_tries = experience, num_tries
        self._steps_without = self._tries = 0

    def stepped(self, num_steps: int, drafts: bool) -> None:
        """So many steps were asked for, and whether any sequence had a drafter."""
        self._steps_without = 0 if drafts else self._steps_without + num_steps
        if self._steps_without >= STEPS_UNTIL_TRIED:
            self._steps_without, self._tries = 0, self._num_tries

    def of_next(self) -> tuple[bool, bool]:
        """Of the next sequence: whether it has a drafter, and whether what was found of drafts is
        forgotten."""
        if self._tries and self._experience.worth_trying:
            self._tries -= 1
            return True, True
        return self._experience.worth_drafting, False

"""Whether a new sequence should draft, from what those before it have shown. No jax.

Where drafts do not pay, sequences come without a drafter, and cost what they cost in plain
decoding. Then nothing more is learnt of drafts; so every so many steps all slots try once more.
"""

from __future__ import annotations

from peagle_jax.serving.engine_protocol import Engine

# Steps without a sequence that drafts, until it is tried again.
STEPS_UNTIL_TRIED = 2000


class Prospects:
    """What a scheduler asks before it takes in a sequence."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps_without = self._tries = 0

    def stepped(self, num_steps: int, drafts: bool) -> None:
        """Steps were asked for, `drafts` as the engine was told."""
        self._steps_without = 0 if drafts else self._steps_without + num_steps
        if self._steps_without >= STEPS_UNTIL_TRIED:
            self._steps_without, self._tries = 0, self._engine.shape.num_slots

    def of_next(self) -> tuple[bool, bool]:
        """(drafts, anew) of the next sequence, see `Insertion`."""
        if self._tries and self._engine.worth_trying:
            self._tries -= 1
            return True, True
        return self._engine.worth_drafting, False

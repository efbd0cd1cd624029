"""What batches in lockstep have shown of drafts, for those that come after them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from peagle_jax.decoding.draft_length import FIRST_RATE, HOPED_RATE, worth_drafting
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.prospects import Prospects

# So many sequences together count as much as all before them.
_SEQUENCES = 4

_worth_drafting = jax.jit(worth_drafting, static_argnames="lengths")


class Outlook:
    """Of a speculator that chooses its draft lengths.

    Attributes:
      rates: acceptance of each draft, those before it being accepted.
      worth_drafting, worth_trying: of the next batch, see `prospects.Experience`.
    """

    def __init__(self, speculator: Speculator) -> None:
        self._lengths = speculator.lengths
        self.rates: Float[np.ndarray, "rates"] = np.full(
            speculator.num_draft_tokens, FIRST_RATE, np.float32
        )
        self.worth_drafting = self.worth_trying = True
        self._prospects = Prospects(self, num_tries=1)

    def of_next(self, costs: Float[np.ndarray, "lengths"]) -> Float[np.ndarray, "rates"] | None:
        """The rates that the next batch, of such step costs, begins with; None = it is better
        decoded without a drafter."""
        hoped = np.full_like(self.rates, HOPED_RATE)
        self.worth_drafting, self.worth_trying = (
            bool(_worth_drafting(jnp.asarray(rates)[None], jnp.asarray(costs), self._lengths))
            for rates in (self.rates, hoped)
        )
        drafts, anew = self._prospects.of_next()
        if not drafts:
            return None
        return hoped if anew else self.rates

    def without_drafts(self, num_steps: int) -> None:
        """A batch was decoded without a drafter, in so many steps."""
        self._prospects.stepped(num_steps, drafts=False)

    def learn(self, rates: Float[np.ndarray, "batch rates"]) -> None:
        """A batch was decoded; rates: what its sequences ended with."""
        self._prospects.stepped(0, drafts=True)
        weight = len(rates) / (len(rates) + _SEQUENCES)
        self.rates = self.rates + np.float32(weight) * (rates.mean(axis=0) - self.rates)

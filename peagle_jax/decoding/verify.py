"""How many drafts stand, and which token comes after them: arrays in, arrays out.

Row j of the target's K+1 rows is the distribution of the token after draft j
(row 0: after the last confirmed token). Both rules are lossless:

- coupled: the target draws its own token at every row with noise keyed by
  position; a draft that equals the draw stands. The output is exactly that of
  plain sampling with the same noise (Daliri et al. 2024, drafter-invariant
  speculative decoding).
- rejection: the classical rule (arXiv 2211.17192, 2302.01318): a draft d stands
  with probability min(1, p(d)/q(d)); otherwise a token of norm(max(p - q, 0)).

Of a tree of drafts the coupled rule follows the branch that the target's own draws take.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.verify_sample import reference
from peagle_jax.decoding.draft_tree import DraftTree, depths


@struct.dataclass
class Verified:
    """tokens[b, :count[b]] are the confirmed tokens: the drafts that stood, then one
    more (the recovered or bonus token). 1 <= count <= K+1."""

    tokens: Int[Array, "batch rows"]
    count: Int[Array, "batch"]


def verify_coupled(
    drafts: Int[Array, "batch drafts"], choices: Int[Array, "batch rows"]
) -> Verified:
    """`choices`: the target's own token at each of the K+1 rows."""
    return Verified(choices, 1 + _leading(drafts == choices[:, :-1]))


def verify_tree(
    tree: DraftTree, choices: Int[Array, "batch rows"]
) -> tuple[Verified, Int[Array, "batch rows"]]:
    """The longest branch whose every token is what the target chose in the row before it.

    choices: the target's own token at each row of the tree, the newest token's first.

    Returns what is confirmed, and the rows it comes from, as many as are confirmed.
    """
    sees = tree.sees
    stands = tree.tokens == jnp.take_along_axis(choices, tree.parents, axis=1)
    stands = jnp.pad(stands, ((0, 0), (1, 0)), constant_values=True)
    whole = jnp.all(stands[:, None] | ~sees, axis=-1)
    depth = depths(sees)
    best = jnp.argmax(jnp.where(whole, depth, -1), axis=1)[:, None]
    branch = jnp.take_along_axis(sees, best[..., None], axis=1)
    at_depth = depth[:, None] == jnp.arange(depth.shape[1])[:, None]
    path = jnp.argmax(branch & at_depth, axis=-1).astype(jnp.int32)
    count = jnp.take_along_axis(depth, best, axis=1)[:, 0] + 1
    return Verified(jnp.take_along_axis(choices, path, axis=1), count), path


def verify_rejection(
    drafts: Int[Array, "batch drafts"],
    draft_logits: Float[Array, "batch drafts vocab"] | None,
    target_logits: Float[Array, "batch rows vocab"],
    greedy: Bool[Array, "batch"],
    accept_noise: Float[Array, "batch drafts"],
    recover_noise: Float[Array, "batch rows vocab"],
) -> Verified:
    """The rejection rule.

    Args:
      draft_logits: processed logits the drafts were sampled from, over the target's
        vocabulary, -inf where the draft vocabulary has no such token; None where the
        drafts are argmaxes (q is one-hot).
      target_logits: processed logits of the K+1 rows.
      greedy: rows with the greedy rule: a draft stands when it is the argmax.
      accept_noise: uniform in [0, 1).
      recover_noise: Gumbel, independent of what the drafts were drawn with; zero in
        greedy rows.
    """
    stands, recovered = reference.reject(
        drafts, draft_logits, target_logits, greedy, accept_noise, recover_noise
    )
    return after_rejection(drafts, stands, recovered)


def after_rejection(
    drafts: Int[Array, "batch drafts"],
    stands: Bool[Array, "batch drafts"],
    recovered: Int[Array, "batch rows"],
) -> Verified:
    """Drafts up to the first that does not stand by itself, then the token of its row."""
    accepted = _leading(stands)
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    index = jnp.arange(recovered.shape[1])
    tokens = jnp.where(index < accepted[:, None], padded, recovered)
    return Verified(tokens, accepted + 1)


def _leading(flags: Bool[Array, "batch drafts"]) -> Int[Array, "batch"]:
    """How many flags hold before the first that does not."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1)

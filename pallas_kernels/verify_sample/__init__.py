"""From the target's logits to tokens: filters, noise and either rule of verification, at once."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.target import Implementation, choose, current_target
from pallas_kernels.verify_sample import gpu, reference, shapes, tpu
from pallas_kernels.verify_sample.filters import Filters
from pallas_kernels.verify_sample.noise import drawn_by_jax
from pallas_kernels.verify_sample.shapes import Blocks

__all__ = ["Blocks", "Filters", "drawn_by_jax", "own_kernel", "reject_drafts", "sample_tokens"]


def sample_tokens(
    logits: Float[Array, "batch rows vocab"],
    filters: Filters,
    keys: UInt32[Array, "batch rows 2"],
    token_ids: Int[Array, "vocab"] | None = None,
    *,
    implementation: Implementation | None = None,
    blocks: Blocks | None = None,
) -> Int[Array, "batch rows"]:
    """Every row's token: the argmax of its filtered log-probabilities plus Gumbel noise.

    Args:
      logits: float32, as the network gives them.
      filters: temperature, top-k, top-p and min-p of each sequence, applied in this order;
        every token tied with a threshold is kept. Greedy sequences take the argmax.
      keys: of each row's noise, as `jax.random.key_data` gives them: it is what
        `jax.random.gumbel` draws with that key, see `drawn_by_jax`.
      token_ids: where in that noise each column stands; None: column i at i.
      implementation: None picks by platform (see `pallas_kernels.target`); an explicit choice
        never falls back.
      blocks: tiling of the kernel; None takes the tuned one.

    Returns:
      int32 columns; of equals the first.

    Raises:
      NotImplementedError: an explicit `implementation` that does not exist or does not cover
        these arguments on this device.
    """
    problem = _problem(logits, drafted=False)
    chosen = _choose(problem, implementation)
    if chosen == "reference":
        return reference.sample_tokens(logits.astype(jnp.float32), filters, keys, token_ids)
    packed = shapes.pack(filters, keys, None, None)
    _, tokens = _kernel(chosen, problem, blocks, False, logits, packed, token_ids, None)
    return tokens.reshape(logits.shape[:2])


def reject_drafts(
    logits: Float[Array, "batch rows vocab"],
    filters: Filters,
    keys: UInt32[Array, "batch rows 2"],
    drafts: Int[Array, "batch drafts"],
    draft_logits: Float[Array, "batch rows vocab"] | None,
    accept_noise: Float[Array, "batch drafts"],
    *,
    implementation: Implementation | None = None,
    blocks: Blocks | None = None,
) -> tuple[Bool[Array, "batch drafts"], Int[Array, "batch rows"]]:
    """The rejection rule (arXiv 2211.17192, 2302.01318) on K drafts and K+1 rows of logits.

    Args:
      logits, filters, keys: of the target, as in `sample_tokens`; the noise draws the token
        that replaces a draft, so it is independent of what drew the drafts.
      drafts: K tokens a sequence.
      draft_logits: what they were drawn from, processed, -inf where it has no such token; None
        where they are argmaxes. The last row, which no draft has, may hold anything.
      accept_noise: uniform in [0, 1).
      implementation, blocks: as in `sample_tokens`.

    Returns:
      stands: whether each draft is accepted, on its own.
      tokens: int32; row j's is the one that replaces draft j, the last row's the bonus token.

    Raises:
      NotImplementedError: as in `sample_tokens`.
    """
    problem = _problem(logits, drafted=draft_logits is not None)
    chosen = _choose(problem, implementation)
    if chosen == "reference":
        wide = logits.astype(jnp.float32)
        return reference.reject_drafts(wide, filters, keys, drafts, draft_logits, accept_noise)
    packed = shapes.pack(filters, keys, drafts, accept_noise)
    stands, tokens = _kernel(chosen, problem, blocks, True, logits, packed, None, draft_logits)
    shape = logits.shape[:2]
    return stands.reshape(shape)[:, : drafts.shape[1]] != 0, tokens.reshape(shape)


def own_kernel(vocab: int, *, drafted: bool = False) -> bool:
    """Whether the device that is traced for has a kernel of its own for float32 logits of so
    many tokens, and jax draws the same noise."""
    problem = shapes.Problem(1, vocab, "float32", drafted)
    return _choose(problem, None) != "reference" and drawn_by_jax()


def _problem(logits: Array, *, drafted: bool) -> shapes.Problem:
    batch, rows, vocab = logits.shape
    return shapes.Problem(batch * rows, vocab, logits.dtype.name, drafted)


def _choose(problem: shapes.Problem, implementation: str | None) -> Implementation:
    return choose(
        "verify_sample",
        implementation,
        {
            "pallas_tpu": lambda: shapes.tpu_limit(problem),
            "pallas_gpu": lambda: shapes.limit(problem),
        },
    )


def _kernel(
    chosen: Implementation,
    problem: shapes.Problem,
    blocks: Blocks | None,
    rejects: bool,
    logits: Array,
    packed: shapes.Packed,
    token_ids: Array | None,
    draft_logits: Array | None,
) -> Any:
    target = current_target()
    if blocks is None:
        blocks = shapes.blocks(problem, target)
    if draft_logits is not None:
        draft_logits = draft_logits.reshape(-1, problem.vocab)
    run = tpu.verify_sample if chosen == "pallas_tpu" else gpu.verify_sample
    return run(
        logits.reshape(-1, problem.vocab),
        packed,
        token_ids,
        draft_logits,
        rejects=rejects,
        blocks=blocks,
        target=target,
    )

"""Sampling for TPU (Mosaic): eight rows of logits at a time, whole in VMEM.

A grid step reads its rows from HBM once, the next step's meanwhile, and keeps their keys and
weights in VMEM, so that a search passes over them there. Nothing but the tokens goes back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.target import Target, out_struct
from pallas_kernels.verify_sample.decide import BOTTOM, Asked, Source, reject, sample
from pallas_kernels.verify_sample.filters import sortable, value_of
from pallas_kernels.verify_sample.shapes import FLOATS, INTS, ROWS, VMEM_LIMIT, Blocks, Packed


def verify_sample(
    logits: Float[Array, "lines vocab"],
    packed: Packed,
    token_ids: Int[Array, "vocab"] | None,
    draft_logits: Float[Array, "lines vocab"] | None,
    *,
    rejects: bool,
    blocks: Blocks,
    target: Target,
) -> tuple[Int[Array, "lines"], Int[Array, "lines"]]:
    """Of each row whether its draft stands, where one is to reject, and its token."""
    (lines, vocab), padded = logits.shape, packed.ints.shape[0]
    size = -(-vocab // blocks.chunk) * blocks.chunk

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((ROWS, width), lambda step: (step, 0))

    operands: list[Array] = [packed.floats, packed.ints, logits]
    specs = [of_rows(FLOATS), of_rows(INTS), of_rows(vocab)]
    if token_ids is not None:
        operands.append(jnp.pad(token_ids.astype(jnp.int32), (0, size - vocab))[None])
        specs.append(pl.BlockSpec((1, size), lambda step: (0, 0)))
    if draft_logits is not None:
        operands.append(draft_logits)
        specs.append(of_rows(vocab))
    scratch = [pltpu.VMEM((ROWS, size), jnp.int32), pltpu.VMEM((ROWS, size), jnp.float32)]
    if draft_logits is not None:
        scratch.append(pltpu.VMEM((ROWS, size), jnp.float32))
    stands, tokens = pl.pallas_call(
        functools.partial(
            _kernel,
            vocab=vocab,
            chunk=blocks.chunk,
            has_ids=token_ids is not None,
            has_drafts=draft_logits is not None,
            rejects=rejects,
        ),
        grid=(padded // ROWS,),
        in_specs=specs,
        out_specs=[of_rows(1), of_rows(1)],
        out_shape=[out_struct((padded, 1), jnp.int32, logits)] * 2,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=200 * logits.size,
            transcendentals=3 * logits.size,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in operands) + 8 * padded,
        ),
        interpret=target.interpret,
        name="verify_sample",
    )(*operands)
    return stands[:lines, 0], tokens[:lines, 0]


class _Rows(Source):
    """A `Source` in VMEM."""

    def __init__(
        self, vocab: int, chunk: int, order_ref: Any, weights_ref: Any, ids_ref: Any, drafts: Any
    ) -> None:
        self.vocab, self.width = vocab, chunk
        self.chunks = order_ref.shape[1] // chunk
        self._order, self._weights, self._ids, self._drafts = (
            order_ref,
            weights_ref,
            ids_ref,
            drafts,
        )
        self.draft: Any = None

    def at(self, chunk: Any) -> Any:
        return pl.ds(pl.multiple_of(chunk * self.width, self.width), self.width)

    def order(self, chunk: Any) -> Array:
        return self._order[:, self.at(chunk)]

    def weigh(self, peak: Array, least: Array) -> None:
        def one(chunk: Any, carry: Any) -> Any:
            order = self.order(chunk)
            weights = jnp.where(order >= least, jnp.exp(value_of(order) - peak), 0.0)
            # Past the vocabulary stands no number.
            self._weights[:, self.at(chunk)] = jnp.where(order > BOTTOM, weights, 0.0)
            return carry

        jax.lax.fori_loop(0, self.chunks, one, 0)

    def weights(self, chunk: Any, peak: Array, least: Array) -> Array:
        del peak, least
        return self._weights[:, self.at(chunk)]

    def counters(self, chunk: Any) -> Array:
        shape = self.order(chunk).shape
        if self._ids is None:
            return chunk * self.width + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        return jnp.broadcast_to(self._ids[:, self.at(chunk)], shape)

    def draft_weights(self, chunk: Any, ids: Array) -> Array:
        if self._drafts is None:
            return jnp.where(ids == self.draft, 1.0, 0.0)
        return self._drafts[:, self.at(chunk)]


def _kernel(
    *refs: Any,
    vocab: int,
    chunk: int,
    has_ids: bool,
    has_drafts: bool,
    rejects: bool,
) -> None:
    floats_ref, ints_ref, logits_ref, *rest = refs
    ids_ref = rest.pop(0) if has_ids else None
    draft_logits_ref = rest.pop(0) if has_drafts else None
    stands_ref, tokens_ref, order_ref, weights_ref, *drafts = rest
    floats, ints = floats_ref[...], ints_ref[...]
    asked = Asked(
        *(floats[:, i : i + 1] for i in range(FLOATS)), *(ints[:, i : i + 1] for i in range(INTS))
    )
    _each_chunk(
        logits_ref, order_ref, vocab, chunk, BOTTOM, lambda x: sortable(x / asked.temperature)
    )
    draft_ref = None
    if draft_logits_ref is not None:
        draft_ref = drafts[0]
        _draft_weights(draft_logits_ref, draft_ref, vocab, chunk)
    source = _Rows(vocab, chunk, order_ref, weights_ref, ids_ref, draft_ref)
    source.draft = asked.draft
    if rejects:
        stands_ref[...], tokens_ref[...] = reject(source, asked)
    else:
        stands_ref[...] = jnp.zeros(stands_ref.shape, jnp.int32)
        tokens_ref[...] = sample(source, asked)


def _each_chunk(
    source: Any, to: Any, vocab: int, chunk: int, fill: Any, of: Callable[[Array], Array]
) -> None:
    """`to` is `of` the source, and `fill` past the vocabulary."""
    whole = vocab // chunk

    def one(index: Any, carry: Any) -> Any:
        at = pl.ds(pl.multiple_of(index * chunk, chunk), chunk)
        to[:, at] = of(source[:, at])
        return carry

    if whole:
        jax.lax.fori_loop(0, whole, one, 0)
    if vocab % chunk:
        begin = whole * chunk
        to[:, begin:] = jnp.full((ROWS, chunk), fill, to.dtype)
        to[:, begin:vocab] = of(source[:, begin:vocab])


def _draft_weights(logits_ref: Any, to: Any, vocab: int, chunk: int) -> None:
    """`exp(logit - highest)`; a row whose logits are all -inf has no weights."""
    _each_chunk(logits_ref, to, vocab, chunk, -jnp.inf, lambda x: x)
    chunks = to.shape[1] // chunk

    def at(index: Any) -> Any:
        return pl.ds(pl.multiple_of(index * chunk, chunk), chunk)

    def higher(index: Any, peak: Array) -> Array:
        return jnp.maximum(peak, jnp.max(to[:, at(index)], axis=1, keepdims=True))

    peak = jax.lax.fori_loop(0, chunks, higher, jnp.full((ROWS, 1), -jnp.inf, jnp.float32))
    peak = jnp.where(peak > -jnp.inf, peak, 0.0)

    def one(index: Any, carry: Any) -> Any:
        to[:, at(index)] = jnp.exp(to[:, at(index)] - peak)
        return carry

    jax.lax.fori_loop(0, chunks, one, 0)

"""Sampling for CUDA GPUs (Triton): a program is a row of logits.

A multiprocessor cannot hold a row, so that a search passes over it in the second-level cache,
where all rows of a verification fit together; keys and weights are made anew at each pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.target import Target, out_struct
from pallas_kernels.verify_sample.decide import BOTTOM, Asked, Source, reject, sample
from pallas_kernels.verify_sample.filters import sortable, value_of
from pallas_kernels.verify_sample.shapes import FLOATS, INTS, Blocks, Packed


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
    lines = logits.shape[0]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    operands: list[Array] = [packed.floats, packed.ints, logits]
    if token_ids is not None:
        operands.append(token_ids.astype(jnp.int32))
    if draft_logits is not None:
        operands.append(draft_logits)
    line = pl.BlockSpec((1, 1), lambda step: (step, 0))
    stands, tokens = pl.pallas_call(
        functools.partial(
            _kernel,
            chunk=blocks.chunk,
            has_ids=token_ids is not None,
            has_drafts=draft_logits is not None,
            rejects=rejects,
        ),
        grid=(lines,),
        in_specs=[whole] * len(operands),
        out_specs=[line, line],
        out_shape=[out_struct((lines, 1), jnp.int32, logits)] * 2,
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=1),
        interpret=bool(target.interpret),
        name="verify_sample",
    )(*operands)
    return stands[:, 0], tokens[:, 0]


class _Row(Source):
    """A `Source` of one row in memory."""

    def __init__(self, asked: Asked, chunk: int, refs: Any, ids_ref: Any, drafts_ref: Any) -> None:
        self._asked, self._refs, self._ids, self._drafts = asked, refs, ids_ref, drafts_ref
        self.vocab, self.width = refs.shape[1], chunk
        self.chunks = -(-self.vocab // chunk)
        self._line = pl.program_id(0)
        self._peak: Any = None if drafts_ref is None else self._draft_peak()

    def _load(self, ref: Any, chunk: Any, fill: float) -> Array:
        token = chunk * self.width + jnp.arange(self.width)
        real = token < self.vocab
        line = jnp.broadcast_to(self._line, token.shape)
        at = (line, jnp.where(real, token, 0))
        return plgpu.load(ref.at[at], mask=real, other=fill)[None, :]

    def _real(self, chunk: Any) -> Array:
        return (chunk * self.width + jnp.arange(self.width) < self.vocab)[None, :]

    def order(self, chunk: Any) -> Array:
        scaled = self._load(self._refs, chunk, 0.0) / self._asked.temperature
        return jnp.where(self._real(chunk), sortable(scaled), BOTTOM)

    def weigh(self, peak: Array, least: Array) -> None:
        del peak, least

    def weights(self, chunk: Any, peak: Array, least: Array) -> Array:
        order = self.order(chunk)
        weights = jnp.exp(value_of(order) - peak)
        return jnp.where((order >= least) & self._real(chunk), weights, 0.0)

    def counters(self, chunk: Any) -> Array:
        token = chunk * self.width + jnp.arange(self.width)
        if self._ids is not None:
            real = token < self.vocab
            token = plgpu.load(self._ids.at[jnp.where(real, token, 0)], mask=real, other=0)
        return token[None, :]

    def draft_weights(self, chunk: Any, ids: Array) -> Array:
        if self._drafts is None:
            return jnp.where(ids == self._asked.draft, 1.0, 0.0)
        return jnp.exp(self._load(self._drafts, chunk, -jnp.inf) - self._peak)

    def _draft_peak(self) -> Array:
        """A row whose logits are all -inf has no weights."""

        def higher(chunk: Any, peak: Array) -> Array:
            logits = self._load(self._drafts, chunk, -jnp.inf)
            return jnp.maximum(peak, jnp.max(logits, axis=1)[:, None])

        begin = jnp.full((1, 1), -jnp.inf, jnp.float32)
        peak = jax.lax.fori_loop(0, self.chunks, higher, begin)
        return jnp.where(peak > -jnp.inf, peak, 0.0)


def _kernel(*refs: Any, chunk: int, has_ids: bool, has_drafts: bool, rejects: bool) -> None:
    floats_ref, ints_ref, logits_ref, *rest = refs
    ids_ref = rest.pop(0) if has_ids else None
    drafts_ref = rest.pop(0) if has_drafts else None
    stands_ref, tokens_ref = rest
    line = pl.program_id(0)

    def column(ref: Any, index: int) -> Array:
        return jnp.full((1, 1), ref[line, index])

    asked = Asked(
        *(column(floats_ref, i) for i in range(FLOATS)), *(column(ints_ref, i) for i in range(INTS))
    )
    source = _Row(asked, chunk, logits_ref, ids_ref, drafts_ref)
    if rejects:
        stands_ref[...], tokens_ref[...] = reject(source, asked)
    else:
        stands_ref[...] = jnp.zeros((1, 1), jnp.int32)
        tokens_ref[...] = sample(source, asked)

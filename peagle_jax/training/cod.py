"""COD sampling (P-EAGLE, arXiv 2602.01469): which mask rows a training step computes.

A drafter that drafts K tokens is trained on elements (anchor a, depth d), d < K: the row
at position a + d of the draft whose last real row stands at a. Depth 0 keeps every
position. Depth d keeps about n * max(r^d, r_min) of n positions, drawn among the
successors of those kept at depth d - 1, so that chains are whole: (a, d) exists only where
(a, d - 1) does. Hence the draw is one list of chains, each an anchor and a length; longest
first, the elements of depth d are a prefix of that list, and all shapes are static.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from peagle_jax.config import check_num_draft_tokens
from peagle_jax.errors import InputError
from peagle_jax.training.batch import PackedBatch


@dataclasses.dataclass(frozen=True)
class ChainSampling:
    """How chains are drawn. Hashable: a jit static.

    num_depths: K, the tokens drafted in one pass, depth 0 included.
    keep_ratio, min_keep_ratio: r and r_min.
    over: which chains are drawn from. "answers": those whose every element, depth 0
      included, predicts a token of an answer, and n counts their anchors. An anchor's chance
      to be kept is about what it is under "all", which draws from every position of the text;
      what is left out is elements that bear no loss, and chains that only reach an answer
      from the prompt before it, which decoding never drafts.
    room: the share of a segment's positions that there is room for in chains, 0 to 1. Rows
      computed are `room` times the number under "all", whatever the batch holds; a segment
      with a larger share of answers draws fewer chains than the ratios say, still uniformly.
    segments: S; the draw is made in each of S equal parts of a row with that part's n, so
      that each has its own fixed capacity (partition.py trains on them one after the other).
      A chain belongs to the part that holds its element of depth 1. S = 1: the whole row.
    """

    num_depths: int = 8
    keep_ratio: float = 0.7
    min_keep_ratio: float = 0.2
    over: Literal["answers", "all"] = "answers"
    room: float = 1.0
    segments: int = 1

    def __post_init__(self) -> None:
        check_num_draft_tokens(self.num_depths)
        for name in ("keep_ratio", "room"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(
                    f"{name}: found {getattr(self, name)}, expected a number above 0, up to 1"
                )
        if not 0 <= self.min_keep_ratio <= 1:
            raise InputError(f"min_keep_ratio: found {self.min_keep_ratio}, expected 0 to 1")
        if self.over not in ("answers", "all"):
            raise InputError(f"over: found {self.over!r}, expected 'answers' or 'all'")
        if self.segments < 1:
            raise InputError(f"segments: found {self.segments}, expected 1 or more")

    @property
    def ratios(self) -> tuple[float, ...]:
        """max(r^d, r_min) for depths 1 .. K-1; never rising."""
        ratios = [max(self.keep_ratio**d, self.min_keep_ratio) for d in range(1, self.num_depths)]
        return tuple(np.minimum.accumulate([1.0, *ratios]).tolist()[1:])

    def segment_length(self, length: int) -> int:
        """Positions a segment of a row of `length`.

        Raises:
          InputError: the segments do not divide the row.
        """
        if length % self.segments:
            raise InputError(
                f"length of a row: found {length}, expected a multiple of "
                f"segments = {self.segments}"
            )
        return length // self.segments

    def slots(self, length: int) -> tuple[int, ...]:
        """Room for elements of depth 1 .. K-1 in each segment of a row of `length`."""
        positions = self.segment_length(length)
        # The small number keeps products that are whole but for rounding from going up.
        return tuple(math.ceil(positions * self.room * ratio - 1e-6) for ratio in self.ratios)


@struct.dataclass
class Chains:
    """The elements below depth 0.

    anchor: index in its row of the chain's last real position.
    length: its elements below depth 0, so the depths 1 .. length; 0 = an unused slot.
      Never rising along the last axis, so that those of depth d are the first few.
    slots: room for elements at depth 1 .. K-1; the first of them is the number of chains.

    The leading axes are batch and segments, or batch alone for one segment's chains.
    """

    anchor: Int[Array, "*batch chains"]
    length: Int[Array, "*batch chains"]
    slots: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def depth(self) -> np.ndarray:
        """int32 `[elements]`: the depth of every element, in blocks of one depth."""
        return np.repeat(np.arange(1, len(self.slots) + 1), self.slots).astype(np.int32)

    @property
    def anchors(self) -> Int[Array, "*batch elements"]:
        """The anchor of every element; chain j's element is the j-th of its depth's block."""
        blocks = [self.anchor[..., :size] for size in self.slots]
        return jnp.concatenate([self.anchor[..., :0], *blocks], axis=-1)

    @property
    def valid(self) -> Bool[Array, "*batch elements"]:
        """Whether the slot holds an element."""
        blocks = [self.length[..., :size] >= d for d, size in enumerate(self.slots, start=1)]
        return jnp.concatenate([self.length[..., :0] > 0, *blocks], axis=-1)

    @property
    def none(self) -> Chains:
        """No chains: depth 0 alone."""
        return Chains(self.anchor[..., :0], self.length[..., :0], ())

    def segment(self, index: Int[Array, ""] | int) -> Chains:
        """One segment's chains, `[batch, chains]`; `index` may be traced."""
        return Chains(
            jax.lax.dynamic_index_in_dim(self.anchor, index, axis=1, keepdims=False),
            jax.lax.dynamic_index_in_dim(self.length, index, axis=1, keepdims=False),
            self.slots,
        )


def bears_loss(batch: PackedBatch) -> Bool[Array, "batch length"]:
    """Whether a row at position p is trained: x_{p+2} is in p's document and in an answer."""
    return _ahead(batch.answer, 2) & _same_document(batch.documents, 2)


def sample_chains(config: ChainSampling, batch: PackedBatch, key: Array) -> Chains:
    """Draws the chains of a batch: a pure function of `key`, which is one or one a row.

    With keys of their own rows draw the same whatever batch, or part of one, they are in.
    One random order of a segment's anchors serves every depth: of those that the last
    depth kept and that can go on, the first `n * ratio` in that order are kept, which is
    a uniformly drawn subset of them.

    Returns:
      Chains `[batch, segments, chains]`. A chain stays in its document, as do the tokens
      that its elements predict.
    """
    rows, length = batch.tokens.shape
    slots, size = config.slots(length), config.segment_length(length)
    shape = (rows, config.segments, size)
    if not slots:
        empty = jnp.zeros((*shape[:2], 0), jnp.int32)
        return Chains(empty, empty, slots)

    counted, can_go_on = _candidates(config, batch)
    n = jnp.sum(counted.reshape(shape), axis=-1, dtype=jnp.float32)
    if key.ndim:
        draws = jax.vmap(lambda one: jax.random.uniform(one, shape[1:]))(key)
    else:
        draws = jax.random.uniform(key, shape)
    order = jnp.argsort(draws, axis=-1)
    kept = jnp.ones(shape, bool)
    lengths = jnp.zeros(shape, jnp.int32)
    for allowed, ratio, room in zip(can_go_on, config.ratios, slots, strict=True):
        # Entry i of a segment is the anchor whose element of depth 1 is its i-th position.
        allowed = jnp.pad(allowed, ((0, 0), (1, 0)))[:, :-1].reshape(shape)
        kept &= jnp.take_along_axis(allowed, order, axis=-1)
        count = jnp.minimum(jnp.round(n * ratio), room)
        kept &= jnp.cumsum(kept, axis=-1) <= count[..., None]
        lengths += kept
    # Longest first, then by position: both are digits of one number.
    code = jnp.sort((len(slots) - lengths) * size + order, axis=-1)[..., : slots[0]]
    lengths = len(slots) - code // size
    starts = size * jnp.arange(config.segments)[:, None]
    anchors = jnp.where(lengths > 0, code % size + starts - 1, starts)
    return Chains(anchors.astype(jnp.int32), lengths.astype(jnp.int32), slots)


def _candidates(
    config: ChainSampling, batch: PackedBatch
) -> tuple[Bool[Array, "batch length"], list[Bool[Array, "batch length"]]]:
    """Which positions n counts, and by depth 1 .. K-1 which anchors' chains may reach it."""
    if config.over == "all":
        counted = batch.documents != 0
        reach = [_same_document(batch.documents, d + 2) for d in range(1, config.num_depths)]
        return counted, reach
    counted = along = bears_loss(batch)
    reach = []
    for depth in range(1, config.num_depths):
        in_answer = _ahead(batch.answer, depth + 2)
        along = along & in_answer & _same_document(batch.documents, depth + 2)
        reach.append(along)
    return counted, reach


def _ahead(x: Array, distance: int) -> Array:
    """x[:, p + distance] at p; 0 past the end."""
    return jnp.pad(x, ((0, 0), (0, distance)))[:, distance:]


def _same_document(
    documents: Int[Array, "batch length"], distance: int
) -> Bool[Array, "batch length"]:
    """Whether p + distance is in p's document; never for padding."""
    return (documents != 0) & (_ahead(documents, distance) == documents)

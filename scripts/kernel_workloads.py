"""The kernels at the sizes that count: shapes, and the bytes and operations that nothing can save.

Read by check_tpu.py and check_gpu.py. A floor counts each byte of the live cache or of the
weights once, and nothing in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cache_write import write_cache, write_cache_paged
from pallas_kernels.cod_attention import cod_attention
from pallas_kernels.mxfp4_matmul import BLOCK, mxfp4_matmul
from pallas_kernels.verify_attention import verify_attention, verify_attention_paged
from pallas_kernels.verify_sample import Filters, reject_drafts, sample_tokens
from peagle_jax.models.layers import argmax_out_in

Shapes = Mapping[str, Any]  # trees of jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Workload:
    """A kernel's public function at one size.

    Attributes:
      kernel, name: what is called, and the size in words.
      function: takes `shapes` and `static` by keyword, and `implementation`.
      moved: bytes that must cross HBM.
      flops: operations that must be done.
      donated: the shapes that the result takes the place of.
      by_rows: parameters that loading places by rows, see docs/design.md.
      bound: most bytes over `moved` that pass, None where no bound is set.
      temporaries: most bytes of HBM beside arguments and results that pass; None: fewer than
        the largest array, which is then not copied.
      own_kernel: False where XLA's own program is what counts: see docs/kernels.md.
    """

    kernel: str
    name: str
    function: Callable[..., Any]
    shapes: Shapes
    moved: int
    flops: int
    static: Mapping[str, Any] = field(default_factory=dict)
    donated: tuple[str, ...] = ()
    by_rows: tuple[str, ...] = ()
    bound: float | None = None
    temporaries: int | None = None
    own_kernel: bool = True

    @property
    def title(self) -> str:
        """Kernel and size."""
        return f"{self.kernel} {self.name}"


def nbytes(shapes: Any) -> int:
    """Bytes of an array or a tree of them, without padding."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def attention(
    name: str,
    batch: int,
    rows: int,
    context: int,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    *,
    page: int | None = None,
    window: int | None = None,
    capacity: int | None = None,
    sinks: bool = False,
    tree: bool = False,
    dtype: Any = jnp.bfloat16,
    cache_dtype: Any = None,
    bound: float | None = 1.15,
) -> Workload:
    """Verification attention over `context` live slots a sequence, heads as in Llama 3 8B."""
    capacity = context if capacity is None else capacity
    held = dtype if cache_dtype is None else cache_dtype
    spec = jax.ShapeDtypeStruct
    shapes = {
        "q": spec((batch, rows, heads, dim), dtype),
        "start": spec((batch,), jnp.int32),
    }
    names, shape = ("keys", "values"), (batch, kv_heads, capacity, dim)
    function: Any = verify_attention
    if page is not None:
        names, function = ("key_pages", "value_pages"), verify_attention_paged
        shape = (batch * capacity // page, kv_heads, page, dim)
        shapes["page_table"] = spec((batch, capacity // page), jnp.int32)
    shapes |= {cache: spec(shape, held) for cache in names}
    if sinks:
        shapes["sinks"] = spec((heads,), jnp.float32)
    if tree:
        shapes["tree"] = spec((batch, rows, rows), jnp.bool_)
    live = 2 * batch * kv_heads * context * dim * jnp.dtype(held).itemsize
    return Workload(
        "verify_attention",
        name,
        function,
        shapes,
        live + 2 * nbytes(shapes["q"]),
        4 * batch * heads * rows * context * dim,
        {} if window is None else {"window": window},
        bound=bound,
    )


def write(
    name: str, batch: int, rows: int, capacity: int, dim: int = 128, *, page: int | None = None
) -> Workload:
    """Cache writes of `rows` new rows a sequence."""
    kv_heads, spec = 8, jax.ShapeDtypeStruct
    new = spec((batch, rows, kv_heads, dim), jnp.bfloat16)
    shapes = {"new_keys": new, "new_values": new, "start": spec((batch,), jnp.int32)}
    names, shape = ("keys", "values"), (batch, kv_heads, capacity, dim)
    function: Any = write_cache
    if page is not None:
        names, function = ("key_pages", "value_pages"), write_cache_paged
        shape = (batch * capacity // page, kv_heads, page, dim)
        shapes["page_table"] = spec((batch, capacity // page), jnp.int32)
    shapes |= {cache: spec(shape, jnp.bfloat16) for cache in names}
    return Workload("cache_write", name, function, shapes, 4 * nbytes(new), 0, donated=names)


def cod_gradients(q: Any, keys: Any, values: Any, own: Any, d_out: Any, **others: Any) -> Any:
    """Output of training attention, and the gradients of what it is given."""

    def attend(*given: Any) -> Any:
        q, keys, values, own = given
        return cod_attention(q=q, keys=keys, values=values, own=own, **others)

    (out, weights), pull_back = jax.vjp(attend, q, keys, values, own)
    return out, pull_back((d_out, weights))


def training(name: str, length: int, depths: int, gradient: bool) -> Workload:
    """Training attention of one document; 64 query and 8 key heads of 64, as in the released
    drafters for gpt-oss; elements of `depths` depths as COD sampling keeps them (r = 0.7,
    r_min = 0.2)."""
    heads, kv_heads, dim, spec = 64, 8, 64, jax.ShapeDtypeStruct
    rows = length + sum(math.ceil(length * max(0.7**d, 0.2) - 1e-6) for d in range(1, depths))
    q = spec((1, rows, heads, dim), jnp.bfloat16)
    keys = spec((1, kv_heads, length, dim), jnp.bfloat16)
    shapes = {
        "q": q,
        "keys": keys,
        "values": keys,
        "anchor": spec((1, rows), jnp.int32),
        "depth": spec((rows,), jnp.int32),
        "documents": spec((1, length), jnp.int32),
        "own": spec((1, rows, kv_heads, heads // kv_heads, depths - 1), jnp.float32),
    }
    moved = 2 * nbytes(q) + 2 * nbytes(keys)
    if gradient:
        shapes["d_out"] = q
        moved *= 2
    # Two products of scores forward, five backward, over the half that is seen.
    products = 7 if gradient else 2
    return Workload(
        "cod_attention",
        name,
        cod_gradients if gradient else cod_attention,
        shapes,
        moved + 2 * nbytes(shapes["own"]) * (1 + gradient),
        products * heads * rows * length * dim,
        temporaries=(8 if gradient else 4) * nbytes(q),
    )


def asked(batch: int, rows: int, vocab: int) -> dict[str, Any]:
    """What every sampling kernel takes."""
    spec = jax.ShapeDtypeStruct
    kinds = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    return {
        "logits": spec((batch, rows, vocab), jnp.float32),
        "filters": Filters(*(spec((batch,), kind) for kind in kinds)),
        "keys": spec((batch, rows, 2), jnp.uint32),
    }


def draw(
    name: str,
    batch: int,
    rows: int,
    vocab: int = 128256,
    *,
    ids: bool = False,
    bound: float | None = 1.15,
) -> Workload:
    """Tokens drawn from logits, over the vocabulary of Llama 3 where no other is named. Its
    operations are not those of a matrix unit, which a floor counts."""
    shapes = asked(batch, rows, vocab)
    if ids:
        shapes["token_ids"] = jax.ShapeDtypeStruct((vocab,), jnp.int32)
    moved = nbytes(shapes["logits"])
    return Workload("verify_sample", name, sample_tokens, shapes, moved, 0, bound=bound)


def reject(name: str, batch: int, drafts: int, vocab: int, *, sampled: bool) -> Workload:
    """The rejection rule; sampled drafts bring their own logits."""
    spec = jax.ShapeDtypeStruct
    shapes = asked(batch, drafts + 1, vocab)
    shapes["drafts"] = spec((batch, drafts), jnp.int32)
    shapes["accept_noise"] = spec((batch, drafts), jnp.float32)
    shapes["draft_logits"] = shapes["logits"] if sampled else None
    moved = nbytes(shapes["logits"]) + nbytes(shapes["draft_logits"])
    return Workload("verify_sample", name, reject_drafts, shapes, moved, 0, bound=1.15)


def head(name: str, rows: int, vocab: int, hidden: int = 4096) -> Workload:
    """A head and its argmax, by XLA."""
    spec = jax.ShapeDtypeStruct

    def function(x: Any, kernel: Any, implementation: str) -> Any:
        assert implementation == "reference"
        return argmax_out_in(x, kernel)

    shapes = {
        "x": spec((rows, hidden), jnp.bfloat16),
        "kernel": spec((vocab, hidden), jnp.bfloat16),
    }
    flops = 2 * rows * vocab * hidden
    moved = nbytes(shapes["kernel"])
    return Workload("head", name, function, shapes, moved, flops, bound=1.05, own_kernel=False)


def packed(name: str, rows: int, experts: int = 32, bound: float | None = 1.15) -> Workload:
    """A grouped product with packed experts, as wide as those of gpt-oss; all of them have rows."""
    spec, width = jax.ShapeDtypeStruct, 2880
    shapes = {
        "x": spec((rows, width), jnp.bfloat16),
        "sizes": spec((experts,), jnp.int32),
        "packed": spec((experts, width // 2, width), jnp.uint8),
        "scales": spec((experts, width // BLOCK, width), jnp.uint8),
    }
    moved = nbytes(shapes) + 4 * rows * width
    flops = 2 * rows * width * width
    kept = ("packed", "scales")
    return Workload(
        "mxfp4_matmul", name, mxfp4_matmul, shapes, moved, flops, by_rows=kept, bound=bound
    )


WORKLOADS: tuple[Workload, ...] = (
    attention("decode b1 8k", 1, 1, 8192),
    attention("verify b1 1k", 1, 8, 1024),
    attention("verify b1 8k", 1, 8, 8192),
    attention("verify b8 8k", 8, 8, 8192),
    attention("verify b32 1k", 32, 8, 1024),
    attention("verify b1 32k", 1, 8, 32768),
    attention("verify b8 8k d64", 8, 8, 8192, dim=64),
    attention("verify b8 8k float32", 8, 8, 8192, dtype=jnp.float32),
    attention("verify b8 8k fp8 cache", 8, 8, 8192, cache_dtype=jnp.float8_e4m3fn),
    attention("draft b8 8k, 16 rows", 8, 16, 8192),
    attention("tree b8 8k, 64 rows", 8, 64, 8192, tree=True),
    # A window of 128 begins within a tile of 128 slots: two are read.
    attention(
        "ring b8, window 128, sinks",
        8,
        8,
        128,
        64,
        dim=64,
        capacity=256,
        window=128,
        sinks=True,
        bound=None,
    ),
    attention("paged b8 8k, pages of 16", 8, 8, 8192, page=16),
    attention("paged b8 8k d64, pages of 128", 8, 8, 8192, dim=64, page=128),
    write("b8 8k", 8, 8, 8192),
    write("b8 8k d64", 8, 8, 8192, 64),
    write("paged b8 8k, pages of 16", 8, 8, 8192, page=16),
    write("paged b8 8k d64, pages of 128", 8, 8, 8192, 64, page=128),
    training("pass over 8k", 8192, 1, gradient=False),
    training("K=8, 8k, gradients", 8192, 8, gradient=True),
    training("K=8, 20k, gradients", 20480, 8, gradient=True),
    # Logits so small XLA may bring into VMEM before the call: one read of HBM, counted as five.
    draw("draw b1", 1, 8, bound=None),
    draw("draw b8", 8, 8),
    draw("draw b8, 201088 tokens", 8, 8, 201088),
    draw("draw b8, draft vocabulary", 8, 8, 32000, ids=True),
    reject("reject b8", 8, 7, 128256, sampled=False),
    reject("reject b8, sampled drafts", 8, 7, 128256, sampled=True),
    packed("decode b1, 4 rows", 4),
    packed("verify b1, 36 rows", 36),
    packed("verify b8, 288 rows", 288),
    packed("prefill, 2048 rows", 2048, bound=None),
    head("draft, 8 rows", 8, 32000),
    head("draft, 64 rows", 64, 32000),
    head("target, 72 rows", 72, 128256),
)

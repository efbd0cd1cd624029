"""Attention of a few new rows over a long cache: decoding, verification and drafting."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.layout import check_lengths
from pallas_kernels.target import Implementation, choose, current_target
from pallas_kernels.verify_attention import gpu, reference, shapes, tpu, xla_cpu
from pallas_kernels.verify_attention.shapes import GpuBlocks, TpuBlocks

__all__ = ["GpuBlocks", "Implementation", "TpuBlocks", "verify_attention", "verify_attention_paged"]


def verify_attention(
    q: Float[Array, "batch rows heads dim"],
    keys: Float[Array, "batch kv_heads capacity dim"],
    values: Float[Array, "batch kv_heads capacity dim"],
    start: Int[Array, "batch"],
    *,
    window: int | None = None,
    sinks: Float[Array, "heads"] | None = None,
    tree: Bool[Array, "batch rows rows"] | None = None,
    implementation: Implementation | None = None,
    blocks: TpuBlocks | GpuBlocks | None = None,
) -> Float[Array, "batch rows heads dim"]:
    """Causal attention of rows at positions `start[b] + r` over a cache that holds them.

    Without a window slot s holds position s, and capacity exceeds every position. With one
    the cache may be a ring of `capacity >= window + rows - 1` slots: slot s holds the newest
    position p <= start + rows - 1 with p % capacity == s, so

        p = last - (last - s) % capacity,    last = start[b] + rows - 1,

    and a slot whose p is negative holds nothing yet. A cache that never wraps is the same
    rule at work. Row r sees p where `start + r - window < p <= start + r`.

    With a tree the new rows are branches: slot `start + j` holds row j, whose position is
    `start` plus the number of its ancestors among the new rows. A row sees the new rows that
    the mask names, and of the older slots those that a row of its position sees.

    Args:
      q: rotated queries. heads is a multiple of kv_heads (grouped-query attention).
      keys, values: the cache, the new rows already written; q's dtype or one that it holds
        exactly (float8).
      start: position of each sequence's first row, at least 0.
      window: sliding window in tokens (a row sees itself and `window - 1` before it).
      sinks: one more score a query head, which takes its share of the softmax and adds no
        value (attention sinks, as in gpt-oss).
      tree: `tree[b, r, j]`: new row r sees new row j; true on the diagonal. None is a chain.
      implementation: None picks by platform (see `pallas_kernels.target`); an explicit choice
        never falls back.
      blocks: tiling of the chosen kernel; None takes the tuned or heuristic one.

    Returns:
      Outputs in q's dtype; softmax in float32.

    Raises:
      NotImplementedError: an explicit `implementation` that does not exist or does not cover
        these arguments on this device.
      ValueError: a concrete `start` whose rows do not fit the cache; a window below 1.
    """
    problem = _problem(q, keys, keys.shape[2])
    if window is None:
        check_lengths(start, q.shape[1], problem.context)
    _check_window(window)
    chosen = _choose(problem, implementation)
    if chosen == "reference":
        return reference.verify_attention(
            q, keys, values, start, window=window, sinks=sinks, tree=tree
        )
    return _kernel(chosen, problem, blocks, q, keys, values, None, start, window, sinks, tree)


def verify_attention_paged(
    q: Float[Array, "batch rows heads dim"],
    key_pages: Float[Array, "pages kv_heads page_size dim"],
    value_pages: Float[Array, "pages kv_heads page_size dim"],
    page_table: Int[Array, "batch pages_per_sequence"],
    start: Int[Array, "batch"],
    *,
    window: int | None = None,
    sinks: Float[Array, "heads"] | None = None,
    tree: Bool[Array, "batch rows rows"] | None = None,
    implementation: Implementation | None = None,
    blocks: TpuBlocks | GpuBlocks | None = None,
) -> Float[Array, "batch rows heads dim"]:
    """`verify_attention` over a cache in pages: position p of sequence b is slot
    `p % page_size` of page `page_table[b, p // page_size]`.

    Table entries whose positions no row sees (past a sequence's length, or before its window)
    are not followed and may hold anything. Arguments, result and errors as there.
    """
    problem = _problem(q, key_pages, key_pages.shape[2] * page_table.shape[1])
    check_lengths(start, q.shape[1], problem.context)
    _check_window(window)
    chosen = _choose(
        problem,
        implementation,
        {"xla_cpu": lambda: shapes.cpu_limit(problem, tree=tree is not None)},
    )
    if chosen in ("reference", "xla_cpu"):
        plain = reference if chosen == "reference" else xla_cpu
        return plain.verify_attention_paged(
            q, key_pages, value_pages, page_table, start, window=window, sinks=sinks, tree=tree
        )
    return _kernel(
        chosen, problem, blocks, q, key_pages, value_pages, page_table, start, window, sinks, tree
    )


def _check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window: found {window}, expected 1 or more, or None")


def _problem(q: Array, keys: Array, context: int) -> shapes.Problem:
    batch, rows, heads, dim = q.shape
    return shapes.Problem(
        batch,
        rows,
        heads,
        keys.shape[1],
        dim,
        keys.shape[2],
        context,
        q.dtype.name,
        keys.dtype.name,
    )


def _choose(
    problem: shapes.Problem,
    implementation: str | None,
    others: Mapping[Implementation, Callable[[], str | None]] | None = None,
) -> Implementation:
    return choose(
        "verify_attention",
        implementation,
        {
            **(others or {}),
            "pallas_tpu": lambda: shapes.tpu_limit(problem),
            "pallas_gpu": lambda: shapes.limit(problem),
        },
    )


def _kernel(
    chosen: Implementation,
    problem: shapes.Problem,
    blocks: TpuBlocks | GpuBlocks | None,
    q: Array,
    keys: Array,
    values: Array,
    page_table: Array | None,
    start: Array,
    window: int | None,
    sinks: Array | None,
    tree: Array | None,
) -> Array:
    target = current_target()
    if blocks is None:
        blocks = shapes.blocks(problem, target)
    arguments = (q, keys, values, page_table, start)
    if chosen == "pallas_tpu":
        assert isinstance(blocks, TpuBlocks), f"{chosen} takes TpuBlocks, found {blocks}"
        return tpu.verify_attention(
            *arguments, window=window, sinks=sinks, tree=tree, blocks=blocks, target=target
        )
    assert isinstance(blocks, GpuBlocks), f"{chosen} takes GpuBlocks, found {blocks}"
    return gpu.verify_attention(
        *arguments, window=window, sinks=sinks, tree=tree, blocks=blocks, target=target
    )

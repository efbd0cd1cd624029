"""Exact next-token distributions, by sorting and in float64, and a test against them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import stats

from peagle_jax.config import SamplingParams
from peagle_jax.decoding.sampling import RequestArrays

# A right sampler fails one check in a million; seeds are fixed, so a pass stays a pass.
SIGNIFICANCE = 1e-6
SAMPLES = 24_000


def kept(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, float]:
    """Which tokens of one row pass the filters, and how near the nearest decision was.

    Tokens tied with the last one kept are kept."""
    scaled = logits.astype(np.float64) / params.temperature
    falling = np.sort(scaled)[::-1]
    keep = np.ones(len(logits), bool)
    if params.top_k:
        keep &= scaled >= falling[min(params.top_k, len(falling)) - 1]
    probs = np.where(keep, np.exp(scaled - falling[0]), 0.0)
    probs /= probs.sum()
    margin = 1.0
    if params.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        mass = np.cumsum(probs[order])
        last = order[np.searchsorted(mass, params.top_p)]
        keep &= probs >= probs[last]
        margin = np.abs(mass - params.top_p).min()
    if params.min_p:
        relative = probs / probs.max()
        keep &= relative >= params.min_p
        margin = min(margin, np.abs(relative[relative < 1] - params.min_p).min(initial=1.0))
    return keep, margin


def probabilities(logits: Any, params: SamplingParams) -> np.ndarray:
    """What a request's token is drawn from, float64, of the shape of `logits` [.., vocab]."""
    logits = np.asarray(logits, np.float64)
    if logits.ndim > 1:
        return np.stack([probabilities(row, params) for row in logits])
    if params.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    keep, _ = kept(logits, params)
    weights = np.where(keep, np.exp((logits - logits.max()) / params.temperature), 0.0)
    return weights / weights.sum()


def p_value(samples: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square test of integer samples [n, ..] against probabilities over their values.

    `samples` [n] with `expected` [v], or [n, d] with d dimensions. Cells that expect fewer than
    5 are counted as one; a sample that cannot be is certain failure."""
    index = np.ravel_multi_index(np.atleast_2d(samples.T), expected.shape)
    counts = np.bincount(index, minlength=expected.size).astype(float)
    wanted = expected.ravel() * len(samples)
    if counts[expected.ravel() == 0].any():
        return 0.0
    rare = wanted < 5
    if wanted[rare].sum() >= 5:
        counts = np.append(counts[~rare], counts[rare].sum())
        wanted = np.append(wanted[~rare], wanted[rare].sum())
    else:
        # Too few to be a cell: they join the smallest one.
        join = np.argmin(np.where(rare, np.inf, wanted))
        counts[join] += counts[rare].sum()
        wanted[join] += wanted[rare].sum()
        counts, wanted = counts[~rare], wanted[~rare]
    if len(wanted) == 1:
        return 1.0
    return float(stats.chisquare(counts, wanted).pvalue)


def table(params: SamplingParams, seeds: np.ndarray, greedy: np.ndarray | None = None) -> Any:
    """RequestArrays of one parameter set under many seeds; temperature 0 where `greedy`."""
    n = len(seeds)
    temperature = np.full(n, params.temperature, np.float32)
    if greedy is not None:
        temperature[greedy] = 0.0
    return RequestArrays(
        temperature=jnp.asarray(temperature),
        top_k=jnp.full(n, params.top_k, jnp.int32),
        top_p=jnp.full(n, params.top_p, jnp.float32),
        min_p=jnp.full(n, params.min_p, jnp.float32),
        seed=jnp.asarray(seeds, jnp.uint32),
        max_new_tokens=jnp.full(n, params.max_new_tokens, jnp.int32),
        ignore_eos=jnp.full(n, params.ignore_eos),
    )

#!/usr/bin/env python3
"""What quantised weights cost a target's quality: its distributions beside those in float32.

    scripts/weights_loss.py [--model M] [--weights int8] [--tokens N] FILE [FILE ..]

The files' text, in windows that begin anew, goes through both targets. Prints the mean KL
divergence from the float32 target in nats a token, the share of positions where both have the same
best token, and the text's perplexity under each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import peagle_jax as pj
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import Decoder

WINDOW = 256


def log_probabilities(config: Any, params: Any, tokens: Any) -> Any:
    """Float32 `[window, vocab]` of a window's rows."""
    network = Decoder(config, jnp.float32)
    cache = KVCache.init(config.block, 1, WINDOW, jnp.float32)
    start = jnp.zeros((1,), jnp.int32)
    hidden = network.apply({"params": params}, tokens[None], start, cache).hidden
    logits = network.apply({"params": params}, hidden, method="logits")[0]
    return jax.nn.log_softmax(logits, axis=-1)


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="int8", choices=("int8", "mxfp4"))
    parser.add_argument("--tokens", type=int, default=2048, help="at most (%(default)s)")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    full = pj.load(options.model, None, dtype="float32")
    rounded = pj.load(options.model, None, dtype="float32", weights=options.weights)
    text = "\n".join(path.read_text(encoding="utf-8") for path in options.files)
    ids = np.asarray(full.tokenizer.encode(text), np.int32)[: options.tokens]
    windows = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)
    if not len(windows):
        print(f"found {len(ids)} tokens, expected {WINDOW} or more", file=sys.stderr)
        return 2

    @jax.jit
    def compare(params: Any, others: Any, tokens: Any) -> Any:
        p, q = (log_probabilities(full.target, tree, tokens) for tree in (params, others))
        following = tokens[1:, None]
        losses = [-jnp.take_along_axis(a[:-1], following, 1)[:, 0] for a in (p, q)]
        same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1), same, *losses

    trees = (full.params["target"], rounded.params["target"])
    found = [compare(*trees, jnp.asarray(window)) for window in windows]
    divergence, same, *losses = (np.concatenate(part) for part in zip(*found, strict=True))
    perplexities = " and ".join(f"{np.exp(loss.mean()):.3f}" for loss in losses)
    print(f"{options.model}, weights {options.weights} beside float32, {windows.size} tokens")
    print(
        f"mean KL divergence   {divergence.mean():.5f} nats, 99% below "
        f"{np.quantile(divergence, 0.99):.4f}"
    )
    print(f"same best token      {100 * same.mean():.2f}%")
    print(f"perplexity           {perplexities}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

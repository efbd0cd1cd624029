"""Drafter logits against speculators' networks: recorded goldens of every flag (tests/goldens),
and the shipped drafter's on real text."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.convert.checkpoint import load_drafter, load_target
from peagle_jax.models.cache import KVCache
from peagle_jax.models.drafter import Drafter

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
CASES = sorted(folder.name for folder in (GOLDENS / "drafters").iterdir())
CAPACITY = 64


@dataclasses.dataclass
class Session:
    """A drafter at work on one sequence: what decoding does, spelled out row by row."""

    config: Any
    params: Any
    lent_embedding: Any = None
    lent_head: Any = None
    capacity: int = CAPACITY

    def __post_init__(self) -> None:
        self.cache = KVCache.init(self.config.block, 1, self.capacity, jnp.float32)

    def call(self, *args: Any, method: str = "__call__") -> Any:
        return Drafter(self.config, jnp.float32).apply(
            {"params": self.params}, *args, method=method
        )

    def rows(self, embeddings: Any, features: Any, start: int) -> tuple[Any, Any]:
        """Logits [rows, draft_vocab] and residual stream of rows at positions start .."""
        position = jnp.array([start], jnp.int32)
        stream, self.cache = self.call(embeddings, features, position, self.cache)
        return self.call(stream, self.lent_head, method="logits")[0], stream

    def embed(self, tokens: Any) -> Any:
        return self.call(jnp.asarray(tokens, jnp.int32)[None], self.lent_embedding, method="embed")

    def draft_in_parallel(self, tokens: Any, aux: Any, start: int, num_draft_tokens: int) -> Any:
        """Real rows (tokens[i], aux[i]) at start .., then K-1 mask rows. All rows' logits."""
        masks = num_draft_tokens - 1
        features = self.call(jnp.asarray(aux)[None], method="project")
        mask_feature = self.call(method="mask_feature")
        mask_features = jnp.broadcast_to(mask_feature, (1, masks, mask_feature.size))
        logits, _ = self.rows(
            self.embed([*tokens, *[self.config.mask_token_id] * masks]),
            jnp.concatenate([features, mask_features], axis=1),
            start,
        )
        return logits

    def draft_in_turn(
        self, tokens: Any, aux: Any, start: int, num_draft_tokens: int
    ) -> tuple[Any, list[int]]:
        """Real rows, then K-1 rows fed with the draft and the output of the row before."""
        features = self.call(jnp.asarray(aux)[None], method="project")
        logits, stream = self.rows(self.embed(tokens), features, start)
        chunks, drafted = [logits], []
        for step in range(num_draft_tokens):
            best = jnp.argmax(chunks[-1][-1:], axis=-1)
            drafted.append(int(self.call(best, method="target_ids")[0]))
            if step < num_draft_tokens - 1:
                feature = self.call(stream[:, -1:], method="next_feature")
                position = start + len(tokens) + step
                logits, stream = self.rows(self.embed(drafted[-1:]), feature, position)
                chunks.append(logits)
        return jnp.concatenate(chunks), drafted


@pytest.mark.parametrize("name", CASES)
def test_draft_steps_equal_speculators(name: str) -> None:
    """The second recorded step continues on the first one's cache: its real rows overwrite what
    the first wrote for guesses, so stale keys or wrong positions would show."""
    folder = GOLDENS / "drafters" / name
    config, params = load_drafter(folder)
    recorded = np.load(folder / "io.npz")
    lent: dict[str, Any] = {
        field: jnp.asarray(recorded[f"target_{name}"])
        for field, name in (("lent_embedding", "embed_tokens"), ("lent_head", "lm_head"))
        if f"target_{name}" in recorded
    }
    session = Session(config, params, **lent)
    done = 0
    for index, (n, k) in enumerate(recorded["steps"].tolist()):
        shifted, aux = recorded["token_ids"][done + 1 : n + 1], recorded["aux_hidden"][done:n]
        if config.parallel:
            logits = session.draft_in_parallel(shifted, aux, done, k)
        else:
            logits, drafted = session.draft_in_turn(shifted, aux, done, k)
            assert drafted == recorded[f"drafted_{index}"].tolist()
        expected = recorded[f"logits_{index}"][done:]
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
        done = n


def test_goldens_cover_the_flags() -> None:
    """Each flag that changes a drafter's arithmetic is on in a recorded case of its kind."""
    configs = [load_drafter(GOLDENS / "drafters" / name)[0] for name in CASES]
    for parallel in (True, False):
        kind = [c for c in configs if c.parallel == parallel]
        for flag in (
            *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
            *("own_embedding", "own_head"),
        ):
            assert {getattr(c, flag) for c in kind} == {True, False}, (parallel, flag)
        for flag in ("qkv_bias", "qk_norm"):
            assert {getattr(c.block, flag) for c in kind} == {True, False}, (parallel, flag)
        assert {c.draft_vocab_size == c.vocab_size for c in kind} == {True, False}
        assert {c.target_hidden_size == c.block.hidden_size for c in kind} == {True, False}
        assert any(any(c.block.windows) for c in kind)
        assert {c.block.rope.kind for c in kind} >= {"default", "llama3"}
    assert any(not c.aux_layer_ids for c in configs if not c.parallel)


@pytest.mark.real_model
def test_shipped_drafter_equals_speculators_on_real_text() -> None:
    """The recorded elements of four anchors, each the draft step of a decode at that length."""
    recorded = np.load(GOLDENS / "fixture_logits.npz")
    target_config, target = load_target("smollm2", dtype=jnp.float32)
    config, params = load_drafter("smollm2", target_config, dtype=jnp.float32)
    anchor, depth = recorded["anchor"], recorded["depth"]
    tokens, aux = recorded["token_ids"], recorded["aux_hidden"]
    k = int(depth.max()) + 1
    for a in np.unique(anchor):
        session = Session(config, params, target["embed_tokens"]["embedding"], capacity=128)
        logits = session.draft_in_parallel(tokens[1 : a + 2], aux[: a + 1], 0, k)
        of_anchor = np.flatnonzero(anchor == a)
        np.testing.assert_allclose(
            logits[a + depth[of_anchor]], recorded["logits"][of_anchor], rtol=0, atol=1e-3
        )

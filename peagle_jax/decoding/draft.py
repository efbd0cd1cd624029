"""Drafting: K tokens in one pass (P-EAGLE), in K passes (EAGLE-3), or from the text's own past.

One pass can also draft a tree, see draft_tree.py.

Positions are as in speculate.py: a sequence's m pending rows end at position n - 1, and drafts
are for positions n + 1 .. n + K.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.config import DraftSampling, Method, Verification, looks_up, needs_drafter
from peagle_jax.decoding import draft_length, draft_tree, sampling
from peagle_jax.decoding.draft_tree import DraftTree
from peagle_jax.decoding.networks import Networks
from peagle_jax.decoding.prompt_lookup import SURE_NGRAM, look_up
from peagle_jax.decoding.sampling import Draws, RequestArrays
from peagle_jax.decoding.state import DecodeState
from peagle_jax.models.layers import ROW_TILE
from peagle_jax.models.paged_cache import Cache


@struct.dataclass
class Drafted:
    """What a draft gives.

    tokens: target ids.
    cache: the drafter's.
    asked: the drafter has what was pending.
    logits: processed, over the draft vocabulary, where a verification by rejection needs them.
    tree: what `tokens` follow, where they are not a chain.
    """

    tokens: Int[Array, "batch drafts"]
    cache: Cache | None
    asked: Bool[Array, ""]
    logits: Float[Array, "batch drafts draft_vocab"] | None = None
    tree: DraftTree | None = None

    def best(self, num_nodes: int) -> Drafted:
        """Fewer nodes of a tree, or no drafts."""
        if not num_nodes:
            return dataclasses.replace(self, tokens=self.tokens[:, :0], tree=None)
        assert self.tree is not None
        tree = self.tree.best(num_nodes)
        return dataclasses.replace(self, tokens=tree.tokens, tree=tree)


Picked = tuple[Int[Array, "batch drafts"], Float[Array, "batch drafts draft_vocab"] | None]


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How a sequence's next K tokens are guessed; see `Speculator` for the fields.

    num_nodes: of a tree, of which a pass guesses `num_draft_tokens` depths; 0 = a chain.
    """

    networks: Networks
    method: Method
    num_draft_tokens: int
    draft_sampling: DraftSampling
    verification: Verification
    num_nodes: int = 0

    def draft(
        self,
        state: DecodeState,
        requests: RequestArrays,
        drawn: Draws,
    ) -> Drafted:
        """K tokens for every sequence. `drawn` is what the target would choose them with."""
        if not self.num_draft_tokens:
            none = jnp.zeros((state.length.shape[0], 0), jnp.int32)
            # Where none is ever asked nothing waits for it.
            return Drafted(none, state.draft_cache, jnp.bool_(self.method == "none"))
        if self.num_nodes:
            return self._tree(state, requests, drawn)
        if not looks_up(self.method):
            return self._by_network(state, requests, drawn)
        found, shared = look_up(state.history, state.length, self.num_draft_tokens)
        if not needs_drafter(self.method):
            return Drafted(found, state.draft_cache, jnp.bool_(True))
        sure = shared >= SURE_NGRAM

        def ask(resting: Drafted) -> Drafted:
            before = dataclasses.replace(state, draft_cache=resting.cache)
            drafted = self._by_network(before, requests, drawn)
            assert drafted.logits is None, "drafts that were looked up are samples of nothing"
            tokens = jnp.where(sure[:, None], found, drafted.tokens)
            return dataclasses.replace(drafted, tokens=tokens)

        # Where no sequence needs it the drafter rests, as long as there is room for what it has
        # not seen.
        most = state.pending_tokens.shape[1] - (self.num_draft_tokens + 1)
        rests = jnp.all(state.finished | (sure & (state.pending_count <= most)))
        resting = Drafted(found, state.draft_cache, jnp.bool_(False))
        return draft_length.switch(jnp.where(rests, 1, 0), [ask], resting)

    def _tree(self, state: DecodeState, requests: RequestArrays, drawn: Draws) -> Drafted:
        """`num_nodes` tokens for every sequence."""
        stream, cache = self._one_pass(state)
        # Of a depth no more ranks than that can be among the nodes.
        ranks = min(self.num_nodes, self._head_size())
        log_probs, ids = self._alternatives(stream, requests, drawn, ranks)
        found = None
        if looks_up(self.method):
            found = look_up(state.history, state.length, self.num_nodes)
        tree = draft_tree.grow(log_probs, ids, self.num_nodes, found)
        return Drafted(tree.tokens, cache, jnp.bool_(True), tree=tree)

    def _by_network(self, state: DecodeState, requests: RequestArrays, drawn: Draws) -> Drafted:
        assert self.networks.drafter is not None
        if self.networks.drafter.parallel:
            return self._in_one_pass(state, requests, drawn)
        return self._in_passes(state, requests, drawn)

    def _in_one_pass(self, state: DecodeState, requests: RequestArrays, drawn: Draws) -> Drafted:
        """One pass whatever K is: each sequence's m real rows, then its K-1 mask rows.

        m is mostly small: where every sequence's rows fit one tile of the matrix products, a
        smaller pass of the same meaning is taken.
        """
        stream, cache = self._one_pass(state)
        drafts, logits = self._pick(stream, requests, drawn)
        return Drafted(drafts, cache, jnp.bool_(True), logits)

    def _one_pass(self, state: DecodeState) -> tuple[Float[Array, "batch drafts hidden"], Cache]:
        return self._in_few_rows(state, self.tiled_rows(state), self._parallel_pass)

    def tiled_rows(self, state: DecodeState) -> int:
        """As many real rows a sequence as whole tiles have room for beside the mask rows."""
        batch, masks = state.pending_count.shape[0], self.num_draft_tokens - 1
        tiled = -(-batch * (1 + masks) // ROW_TILE) * ROW_TILE
        return min(max(1, tiled // batch - masks), state.pending_tokens.shape[1])

    def _in_few_rows(
        self, state: DecodeState, few: int, run: Callable[..., tuple[Array, Cache]]
    ) -> tuple[Array, Cache]:
        """`run(state, m, most)`, `most` as few rows as all sequences' m fit in: `few`, those
        that a step of this length confirms at most, or all there are."""
        # A finished row's m is stale, and nothing of it counts.
        m = jnp.where(state.finished, 1, state.pending_count)
        rows = state.pending_tokens.shape[1]
        few = min(few, rows)
        confirmed = max(self.num_draft_tokens, self.num_nodes) + 1
        sizes = sorted({few, min(rows, max(few, confirmed)), rows})
        if len(sizes) == 1:
            return run(state, m, rows)
        place = jnp.sum(jnp.max(m) > jnp.array(sizes[:-1], jnp.int32))

        def branch(most: int, before: tuple[Array, Cache]) -> tuple[Array, Cache]:
            kept = dataclasses.replace(state, draft_cache=before[1])
            return run(kept, jnp.minimum(m, most), most)

        # Nothing, of the shape of what comes.
        shape = jax.eval_shape(lambda: run(state, m, rows)[0])
        none = jnp.zeros(shape.shape, shape.dtype)
        assert state.draft_cache is not None
        branches = [functools.partial(branch, most) for most in sizes]
        return draft_length.switch(place, branches, (none, state.draft_cache))

    def _parallel_pass(
        self, state: DecodeState, m: Int[Array, "batch"], most: int
    ) -> tuple[Float[Array, "batch drafts hidden"], Cache]:
        """The residual streams that draft, for at most `most` real rows a sequence.

        All rows of a sequence stand at consecutive positions from n - m on. The rows
        after the last mask row are padding: causal, so nothing that counts sees them.
        """
        k, networks = self.num_draft_tokens, self.networks
        assert networks.drafter is not None
        assert networks.drafter.mask_token_id is not None
        real = jnp.arange(most + k - 1) < m[:, None]
        extra = ((0, 0), (0, k - 1))
        tokens = jnp.pad(state.pending_tokens[:, :most], extra)
        tokens = jnp.where(real, tokens, networks.drafter.mask_token_id)
        features = networks.of_drafter(state.pending_features[:, :most], method="project")
        features = jnp.pad(features, (*extra, (0, 0)))
        # The same in every step: XLA takes it out of the loop around them.
        mask_feature = networks.of_drafter(method="mask_feature")
        features = jnp.where(real[..., None], features, mask_feature)
        stream, cache = networks.of_drafter(
            networks.draft_embed(tokens), features, state.length - m, state.draft_cache
        )
        # Row m-1 holds the newest token and drafts the first; the mask rows follow it.
        rows = m[:, None] - 1 + jnp.arange(k)
        return jnp.take_along_axis(stream, rows[..., None], axis=1), cache

    def _in_passes(self, state: DecodeState, requests: RequestArrays, drawn: Draws) -> Drafted:
        """K passes: the m real rows first, then one row a pass from its own guesses."""
        networks = self.networks
        stream, cache = self._in_few_rows(state, self.num_draft_tokens + 1, self._first_pass)
        drafts, logits = self._pick(stream, requests, drawn.rows(slice(1)))
        all_drafts, all_logits = [drafts], [logits]
        for j in range(1, self.num_draft_tokens):
            # The guessed rows' keys are overwritten by real ones in the next step.
            stream, cache = networks.of_drafter(
                networks.draft_embed(drafts),
                networks.of_drafter(stream, method="next_feature"),
                state.length + j - 1,
                cache,
            )
            drafts, logits = self._pick(stream, requests, drawn.rows(slice(j, j + 1)))
            all_drafts.append(drafts)
            all_logits.append(logits)
        kept = [logits for logits in all_logits if logits is not None]
        together = jnp.concatenate(kept, 1) if kept else None
        return Drafted(jnp.concatenate(all_drafts, 1), cache, jnp.bool_(True), together)

    def _first_pass(
        self, state: DecodeState, m: Int[Array, "batch"], most: int
    ) -> tuple[Float[Array, "batch 1 hidden"], Cache]:
        """The residual stream of each sequence's newest of at most `most` real rows."""
        networks = self.networks
        stream, cache = networks.of_drafter(
            networks.draft_embed(state.pending_tokens[:, :most]),
            networks.of_drafter(state.pending_features[:, :most], method="project"),
            state.length - m,
            state.draft_cache,
        )
        return jnp.take_along_axis(stream, (m - 1)[:, None, None], axis=1), cache

    def _pick(
        self,
        stream: Float[Array, "batch drafts hidden"],
        requests: RequestArrays,
        drawn: Draws,
    ) -> Picked:
        """Drafts from the drafter's streams: argmax, or sampled with the target's own noise."""
        networks = self.networks

        def best() -> Array:
            return networks.draft_head(stream, "best")

        def raw() -> Array:
            return networks.draft_head(stream, "logits")

        ids = self._token_ids()
        logits = None
        if self.draft_sampling == "greedy":
            draft_ids = best()
        elif self.verification == "rejection":
            logits = sampling.process_logits(raw(), requests)
            noise = drawn.noise_of(requests, logits.shape[-1], ids)
            draft_ids = sampling.choose(logits, noise)
        else:
            draft_ids = jax.lax.cond(
                jnp.all(requests.greedy),
                best,
                lambda: sampling.sample(raw(), requests, drawn, ids),
            )
        return networks.of_drafter(draft_ids, method="target_ids"), logits

    def _alternatives(
        self,
        stream: Float[Array, "batch depths hidden"],
        requests: RequestArrays,
        drawn: Draws,
        ranks: int,
    ) -> tuple[Float[Array, "batch depths ranks"], Int[Array, "batch depths ranks"]]:
        """The best tokens of every depth and how sure the drafter is of each; drafts that are
        sampled are the best ones under the target's own noise."""
        networks, ids = self.networks, self._token_ids()
        logits = networks.draft_head(stream, "logits")

        def noisy() -> Array:
            along = drawn.rows(slice(self.num_draft_tokens))
            noise = along.noise_of(requests, logits.shape[-1], ids)
            return sampling.process_logits(logits, requests) + noise

        if self.draft_sampling == "sample":
            logits = jax.lax.cond(jnp.all(requests.greedy), lambda: logits, noisy)
        log_probs, best = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), ranks)
        return log_probs, networks.of_drafter(best, method="target_ids")

    def _head_size(self) -> int:
        assert self.networks.drafter is not None
        return self.networks.drafter.draft_vocab_size

    def _token_ids(self) -> Any:
        """The target's ids of the draft vocabulary's tokens, None where all are drafted."""
        drafter = self.networks.drafter
        assert drafter is not None
        if drafter.draft_vocab_size == drafter.vocab_size:
            return None
        return self.networks.params["drafter"]["draft_to_target"]

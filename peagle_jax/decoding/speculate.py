"""The speculative step: draft K tokens, verify them in one pass, commit what stands.

One step serves every method: plain decoding is the step with K = 0, EAGLE-3 the
step whose drafts take K passes, P-EAGLE the one whose drafts take one. Whole-loop
generation, streaming and a serving engine all call `Speculator.step`.

Positions. `length` n counts the tokens whose keys are in the target's cache, so
the newest token x_n stands at position n and is not in it yet. A step verifies
x_n, d_1 .. d_K at positions n .. n+K. Its m confirmed tokens become the pending
rows of the next draft: (x_{p+1}, f_p) for p = n .. n+m-1.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from peagle_jax.config import DrafterConfig, DraftSampling, Method, ModelConfig, Verification
from peagle_jax.decoding import sampling
from peagle_jax.decoding.sampling import RequestArrays
from peagle_jax.decoding.verify import Verified, verify_coupled, verify_rejection
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import Decoder, DecoderOutput
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.layers import ROW_TILE
from peagle_jax.models.paged_cache import Cache

Params = dict[str, Any]  # {"target": ..., "drafter": ...}; "drafter" absent when plain


@struct.dataclass
class DecodeState:
    """Everything a step needs and returns. K = drafts a step, F = raw feature width.

    length: n, tokens in the target's cache = position of `last_token`.
    last_token: x_n, confirmed and not yet seen by the target.
    pending_tokens, pending_features: the drafter's real rows to come; entry i < m
      pairs x_{p+1} with the target's feature of position p = n - m + i.
    pending_count: m, 1 .. K+1.
    output: confirmed tokens; entries from `emitted` on are scratch.
    emitted: how many tokens of `output` count.
    finished: rows that are done; a step leaves their counters as they are.
    hit_eos: finished by an end-of-sequence token rather than by length.
    num_drafts: verification steps that had drafts.
    accepted_per_position: of those, how many accepted the draft at each position.
    """

    target_cache: Cache
    draft_cache: Cache | None
    length: Int[Array, "batch"]
    last_token: Int[Array, "batch"]
    pending_tokens: Int[Array, "batch pending"]
    pending_features: Float[Array, "batch pending raw"]
    pending_count: Int[Array, "batch"]
    output: Int[Array, "batch output"]
    emitted: Int[Array, "batch"]
    finished: Bool[Array, "batch"]
    hit_eos: Bool[Array, "batch"]
    num_drafts: Int[Array, "batch"]
    accepted_per_position: Int[Array, "batch drafts"]


@dataclasses.dataclass(frozen=True)
class Speculator:
    """A target, perhaps a drafter, and how they work together. Hashable: a jit static.

    `num_draft_tokens` is K, 0 exactly when `method` is "none".
    """

    target: ModelConfig
    drafter: DrafterConfig | None = None
    method: Method = "none"
    num_draft_tokens: int = 0
    draft_sampling: DraftSampling = "sample"
    verification: Verification = "coupled"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if (self.method == "none") != (self.num_draft_tokens == 0):
            raise ValueError("num_draft_tokens is 0 exactly when nothing is drafted")
        if self.method != "none" and (self.drafter is None or self.drafter.method != self.method):
            raise ValueError(f"method {self.method!r} needs a drafter that was trained for it")

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Depths whose residual streams the target hands over."""
        return self.drafter.aux_layer_ids if self.drafts and self.drafter else ()

    @property
    def drafts(self) -> bool:
        """Whether this drafts at all."""
        return self.num_draft_tokens > 0

    def required_capacity(self, prompt_size: int, max_new_tokens: int) -> int:
        """Cache slots that no write of a generation can leave.

        A verification writes up to position prompt + new + K - 1, a draft up to
        prompt + new + 2K - 2. Rounded up so that near sizes share a compilation.
        """
        needed = prompt_size + max_new_tokens + 2 * self.num_draft_tokens + 1
        return -(-needed // 64) * 64

    def init_state(self, batch: int, prompt_size: int, max_new_tokens: int) -> DecodeState:
        """Empty caches and counters for `batch` sequences.

        The caches' spans: from a step's first position a verification writes K+1 positions
        and a draft up to 2K, of which the next step may begin at any but the first.
        """
        capacity = self.required_capacity(prompt_size, max_new_tokens)
        k, dtype = self.num_draft_tokens, jnp.dtype(self.dtype)
        width = self.drafter.feature_size if self.drafts and self.drafter else 0
        draft_cache = None
        if self.drafts and self.drafter:
            draft_cache = KVCache.init(self.drafter.block, batch, capacity, dtype, span=2 * k)

        def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
            return jnp.zeros((batch, *shape), dtype)

        return DecodeState(
            target_cache=KVCache.init(self.target.block, batch, capacity, dtype, span=k + 1),
            draft_cache=draft_cache,
            length=zeros(),
            last_token=zeros(),
            pending_tokens=zeros(k + 1),
            pending_features=zeros(k + 1, width, dtype=dtype),
            pending_count=zeros(),
            output=zeros(max_new_tokens + k + 1),
            emitted=zeros(),
            finished=zeros(dtype=bool),
            hit_eos=zeros(dtype=bool),
            num_drafts=zeros(),
            accepted_per_position=zeros(k),
        )

    # --- one step -----------------------------------------------------------------

    def step(self, params: Params, state: DecodeState, requests: RequestArrays) -> DecodeState:
        """Draft, verify and commit once, for every row that is not finished."""
        k = self.num_draft_tokens
        # Row j of the verification decides the token at position n + 1 + j.
        positions = state.length[:, None] + 1 + jnp.arange(k + 1)
        noise = sampling.gumbel_noise(requests, positions, self.target.vocab_size)
        with jax.named_scope("draft"):
            drafts, draft_logits, draft_cache = self.draft(params, state, requests, noise[:, :k])
        with jax.named_scope("verify"):
            tokens = jnp.concatenate([state.last_token[:, None], drafts], axis=1)
            out = self._decoder().apply(
                {"params": params["target"]},
                tokens,
                state.length,
                state.target_cache,
                self.aux_layer_ids,
            )
            if self.verification == "coupled" or not self.drafts:
                choices = self.choose(params, out.hidden, requests, noise)
                verified = verify_coupled(drafts, choices)
            else:
                verified = self._reject(
                    params, drafts, draft_logits, out.hidden, requests, positions
                )
        with jax.named_scope("commit"):
            active = ~state.finished
            accepted = (jnp.arange(k) < verified.count[:, None] - 1) & active[:, None]
            state = dataclasses.replace(
                state,
                target_cache=out.cache,
                draft_cache=draft_cache,
                num_drafts=state.num_drafts + active * (1 if k else 0),
                accepted_per_position=state.accepted_per_position + accepted,
            )
            return self.commit(state, requests, verified, out.features)

    def commit(
        self,
        state: DecodeState,
        requests: RequestArrays,
        verified: Verified,
        features: Float[Array, "batch rows raw"],
    ) -> DecodeState:
        """Append confirmed tokens, cut at the end of sequence or at max_new_tokens.

        `features` are the target's of the verified rows, the first at position
        `length`; `length` moves on past all but the newest confirmed token.
        """
        rows = verified.tokens.shape[1]
        index = jnp.arange(rows)
        ends = jnp.zeros_like(verified.tokens, bool)
        for eos in self.target.eos_token_ids:
            ends |= verified.tokens == eos
        ends &= (index < verified.count[:, None]) & ~requests.ignore_eos[:, None]
        until_eos = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1) + 1, rows + 1)
        room = requests.max_new_tokens - state.emitted
        kept = jnp.minimum(jnp.minimum(verified.count, until_eos), room)
        hit_eos = until_eos <= kept
        done = hit_eos | (kept >= room)

        active = ~state.finished
        kept = jnp.where(active, kept, 0)
        # In range: emitted <= max_new_tokens and the buffer has K+1 spare entries.
        output = jax.vmap(lambda o, t, at: jax.lax.dynamic_update_slice(o, t, (at,)))(
            state.output, verified.tokens, state.emitted
        )
        last = jnp.take_along_axis(verified.tokens, verified.count[:, None] - 1, axis=1)[:, 0]
        pad = state.pending_tokens.shape[1] - rows
        moved = dataclasses.replace(
            state,
            length=state.length + verified.count,
            last_token=last,
            pending_tokens=jnp.pad(verified.tokens, ((0, 0), (0, pad))),
            pending_features=jnp.pad(
                features[..., : state.pending_features.shape[-1]], ((0, 0), (0, pad), (0, 0))
            ),
            pending_count=verified.count,
        )
        # A finished row stands still: its scratch writes stay where there is room.
        frozen = ("length", "last_token", "pending_tokens", "pending_features", "pending_count")
        kept_still: dict[str, Any] = {
            name: _select(active, getattr(moved, name), getattr(state, name)) for name in frozen
        }
        return dataclasses.replace(
            moved,
            **kept_still,
            output=output,
            emitted=state.emitted + kept,
            finished=state.finished | done,
            hit_eos=jnp.where(active, hit_eos, state.hit_eos),
        )

    # --- drafting -----------------------------------------------------------------

    def draft(
        self,
        params: Params,
        state: DecodeState,
        requests: RequestArrays,
        noise: Float[Array, "batch drafts vocab"],
    ) -> tuple[
        Int[Array, "batch drafts"], Float[Array, "batch drafts draft_vocab"] | None, Cache | None
    ]:
        """K drafted tokens (target ids), their processed logits, the drafter's cache."""
        if not self.drafts:
            return jnp.zeros((state.length.shape[0], 0), jnp.int32), None, None
        if self.method == "p-eagle":
            return self._draft_parallel(params, state, requests, noise)
        return self._draft_autoregressive(params, state, requests, noise)

    def _draft_parallel(
        self, params: Params, state: DecodeState, requests: RequestArrays, noise: Array
    ) -> tuple[Array, Array | None, Cache]:
        """One pass whatever K is: each sequence's m real rows, then its K-1 mask rows.

        m is K+1 at most, but mostly small: where every sequence's rows fit one tile of
        the matrix products, a smaller pass of the same meaning is taken.
        """
        k = self.num_draft_tokens
        # A finished row's m is stale, and nothing of it counts.
        m = jnp.where(state.finished, 1, state.pending_count)

        def run(most: int) -> tuple[Array, Cache]:
            return self._parallel_pass(params, state, jnp.minimum(m, most), most)

        few = max(1, ROW_TILE - (k - 1))
        if few < k + 1:
            stream, cache = jax.lax.cond(jnp.max(m) <= few, lambda: run(few), lambda: run(k + 1))
        else:
            stream, cache = run(k + 1)
        drafts, logits = self._pick(params, stream, requests, noise)
        return drafts, logits, cache

    def _parallel_pass(
        self, params: Params, state: DecodeState, m: Int[Array, "batch"], most: int
    ) -> tuple[Float[Array, "batch drafts hidden"], Cache]:
        """The residual streams that draft, for at most `most` real rows a sequence.

        All rows of a sequence stand at consecutive positions from n - m on. The rows
        after the last mask row are padding: causal, so nothing that counts sees them.
        """
        k = self.num_draft_tokens
        assert self.drafter is not None
        assert self.drafter.mask_token_id is not None
        apply = self._drafter(params)
        real = jnp.arange(most + k - 1) < m[:, None]
        extra = ((0, 0), (0, k - 1))
        tokens = jnp.pad(state.pending_tokens[:, :most], extra)
        tokens = jnp.where(real, tokens, self.drafter.mask_token_id)
        features = apply(state.pending_features[:, :most], method="project")
        features = jnp.pad(features, (*extra, (0, 0)))
        features = jnp.where(real[..., None], features, apply(method="mask_feature"))
        stream, cache = apply(
            self._embed(params, tokens), features, state.length - m, state.draft_cache
        )
        # Row m-1 holds the newest token and drafts the first; the mask rows follow it.
        rows = m[:, None] - 1 + jnp.arange(k)
        return jnp.take_along_axis(stream, rows[..., None], axis=1), cache

    def _draft_autoregressive(
        self, params: Params, state: DecodeState, requests: RequestArrays, noise: Array
    ) -> tuple[Array, Array | None, Cache]:
        """K passes: the m real rows first, then one row a pass from its own guesses."""
        k = self.num_draft_tokens
        assert state.draft_cache is not None
        apply = self._drafter(params)
        stream, cache = apply(
            self._embed(params, state.pending_tokens),
            apply(state.pending_features, method="project"),
            state.length - state.pending_count,
            state.draft_cache,
        )
        last = (state.pending_count - 1)[:, None, None]
        stream = jnp.take_along_axis(stream, last, axis=1)
        drafts, logits = self._pick(params, stream, requests, noise[:, :1])
        all_drafts, all_logits = [drafts], [logits]
        for j in range(1, k):
            # The guessed rows' keys are overwritten by real ones in the next step.
            stream, cache = apply(
                self._embed(params, drafts),
                apply(stream, method="next_feature"),
                state.length + j - 1,
                cache,
            )
            drafts, logits = self._pick(params, stream, requests, noise[:, j : j + 1])
            all_drafts.append(drafts)
            all_logits.append(logits)
        kept = [logits for logits in all_logits if logits is not None]
        return jnp.concatenate(all_drafts, 1), jnp.concatenate(kept, 1) if kept else None, cache

    def _pick(
        self,
        params: Params,
        stream: Float[Array, "batch drafts hidden"],
        requests: RequestArrays,
        noise: Float[Array, "batch drafts vocab"],
    ) -> tuple[Int[Array, "batch drafts"], Float[Array, "batch drafts draft_vocab"] | None]:
        """Drafts from the drafter's streams: argmax, or sampled with the target's own noise.

        The processed logits come with them where a verification by rejection needs them.
        """
        apply = self._drafter(params)
        head = self._lent_head(params)

        def best() -> Array:
            return apply(stream, head, method="best")

        def sample() -> tuple[Array, Array]:
            logits = sampling.process_logits(apply(stream, head, method="logits"), requests)
            return sampling.choose(logits, self._to_draft_vocab(params, noise)), logits

        logits = None
        if self.draft_sampling == "greedy":
            draft_ids = best()
        elif self.verification == "rejection":
            draft_ids, logits = sample()
        else:
            draft_ids = jax.lax.cond(jnp.all(requests.greedy), best, lambda: sample()[0])
        return apply(draft_ids, method="target_ids"), logits

    def choose(
        self,
        params: Params,
        hidden: Float[Array, "batch rows hidden"],
        requests: RequestArrays,
        noise: Float[Array, "batch rows vocab"],
    ) -> Int[Array, "batch rows"]:
        """The target's own token at every row. Where no row samples nothing is made of
        the logits but their argmax."""
        decoder = self._decoder()

        def apply(method: str) -> Any:
            return decoder.apply({"params": params["target"]}, hidden, method=method)

        def sample() -> Array:
            return sampling.choose(sampling.process_logits(apply("logits"), requests), noise)

        return jax.lax.cond(jnp.all(requests.greedy), lambda: apply("best"), sample)

    def _to_draft_vocab(self, params: Params, noise: Array) -> Array:
        """The noise of the draft vocabulary's tokens."""
        assert self.drafter is not None
        if self.drafter.draft_vocab_size == self.drafter.vocab_size:
            return noise
        return jnp.take(noise, params["drafter"]["draft_to_target"], axis=-1)

    def _reject(
        self,
        params: Params,
        drafts: Array,
        draft_logits: Array | None,
        hidden: Array,
        requests: RequestArrays,
        positions: Array,
    ) -> Verified:
        """The classical rule, with q over the target's vocabulary where drafts were sampled."""
        reduced = self.drafter and self.drafter.draft_vocab_size < self.drafter.vocab_size
        if draft_logits is not None and reduced:
            ids = params["drafter"]["draft_to_target"]
            full = jnp.full((*draft_logits.shape[:-1], self.target.vocab_size), sampling.MASKED)
            draft_logits = full.at[..., ids].set(draft_logits)
        processed = sampling.process_logits(self.target_logits(params, hidden), requests)
        accept = sampling.uniform_noise(requests, positions[:, :-1], sampling.STREAM_ACCEPT)
        recover = sampling.gumbel_noise(
            requests, positions, self.target.vocab_size, sampling.STREAM_RECOVER
        )
        return verify_rejection(drafts, draft_logits, processed, requests.greedy, accept, recover)

    def prefill_chunk(
        self,
        params: Params,
        target_cache: Cache,
        draft_cache: Cache | None,
        tokens: Int[Array, "batch rows"],
        following: Int[Array, "batch rows"],
        start: Int[Array, "batch"],
        counts: Int[Array, "batch"],
    ) -> tuple[DecoderOutput, Cache | None]:
        """A piece of the prompts through both networks; `following` is the token after each,
        `counts` how many rows of a sequence its prompt has here."""
        out = self._decoder().apply(
            {"params": params["target"]},
            tokens,
            start,
            target_cache,
            self.aux_layer_ids,
            counts,
        )
        if not self.drafts:
            return out, None
        apply = self._drafter(params)
        features = apply(out.features, method="project")
        embeddings = self._embed(params, following)
        _, written = apply(embeddings, features, start, draft_cache, counts)
        return out, written

    # --- networks -----------------------------------------------------------------

    def _decoder(self) -> Decoder:
        return Decoder(self.target, jnp.dtype(self.dtype))

    def target_logits(self, params: Params, hidden: Array) -> Array:
        """Float32 logits of the target."""
        return self._decoder().apply({"params": params["target"]}, hidden, method="logits")

    def _drafter(self, params: Params) -> Any:
        assert self.drafter is not None
        network = Drafter(self.drafter, jnp.dtype(self.dtype))

        def apply(*args: Any, method: str = "__call__") -> Any:
            return network.apply({"params": params["drafter"]}, *args, method=method)

        return apply

    def _embed(self, params: Params, tokens: Array) -> Array:
        lent = params["target"]["embed_tokens"]["embedding"]
        return self._drafter(params)(tokens, lent, method="embed")

    def _lent_head(self, params: Params) -> Array:
        if self.target.tie_embeddings:
            return params["target"]["embed_tokens"]["embedding"]
        return params["target"]["lm_head"]["kernel"]


def _select(active: Array, new: Array, old: Array) -> Array:
    return jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old)

"""The speculative step: draft K tokens, verify them in one pass, commit what stands.

One step serves every method: plain decoding is the step with K = 0, EAGLE-3 the step whose
drafts take K passes, P-EAGLE the one whose drafts take one, prompt lookup the one whose drafts
take none. Whole-loop generation, streaming and a serving engine all call `Speculator.step`.

Positions. `length` n counts the tokens whose keys are in the target's cache, so
the newest token x_n stands at position n and is not in it yet. A step verifies
x_n, d_1 .. d_K at positions n .. n+K. Its m confirmed tokens become the pending
rows of the next draft: (x_{p+1}, f_p) for p = n .. n+m-1. Of a tree the branch that
stands is moved to these positions.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.verify_sample import own_kernel, reject_drafts
from peagle_jax.config import (
    DrafterConfig,
    DraftSampling,
    Method,
    ModelConfig,
    Verification,
    drafts_tree,
    looks_up,
    network_method,
)
from peagle_jax.decoding import draft_length, sampling
from peagle_jax.decoding.commit import commit
from peagle_jax.decoding.draft import Drafted, Drafting
from peagle_jax.decoding.draft_length import FIRST_RATE, MOST_PENDING
from peagle_jax.decoding.draft_tree import DraftTree, depths
from peagle_jax.decoding.networks import Networks
from peagle_jax.decoding.sampling import Draws, RequestArrays
from peagle_jax.decoding.state import DecodeState, Params
from peagle_jax.decoding.verify import (
    Verified,
    after_rejection,
    verify_coupled,
    verify_rejection,
    verify_tree,
)
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import DecoderOutput
from peagle_jax.models.paged_cache import Cache
from peagle_jax.sharding import per_device


@dataclasses.dataclass(frozen=True)
class Speculator:
    """A target, perhaps a drafter, and how they work together. Hashable: a jit static.

    `num_draft_tokens` is K, 0 exactly when `method` is "none". There is a drafter exactly
    when the method needs one. `lengths`: the draft lengths that each step chooses from, rising
    from 0 to K; none = always K. Of a tree K is the number of its nodes.
    """

    target: ModelConfig
    drafter: DrafterConfig | None = None
    method: Method = "none"
    num_draft_tokens: int = 0
    draft_sampling: DraftSampling = "sample"
    verification: Verification = "coupled"
    dtype: str = "float32"
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if (self.method == "none") != (self.num_draft_tokens == 0):
            raise ValueError("num_draft_tokens is 0 exactly when nothing is drafted")
        trained_for = self.drafter.method if self.drafter else None
        if trained_for != network_method(self.method):
            raise ValueError(f"method {self.method!r} with a drafter for {trained_for!r}")
        if (
            self.drafter
            and looks_up(self.method)
            and (self.verification, self.draft_sampling) == ("rejection", "sample")
        ):
            raise ValueError("drafts that are looked up are samples of nothing")
        if drafts_tree(self.method) and self.verification == "rejection":
            raise ValueError("a tree's drafts are alternatives, samples of nothing")
        if self.lengths and (
            list(self.lengths) != sorted({0, *self.lengths})
            or self.lengths[-1] != self.num_draft_tokens
        ):
            raise ValueError(f"draft lengths {self.lengths} up to {self.num_draft_tokens}")

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Depths whose residual streams the target hands over."""
        return self.drafter.aux_layer_ids if self.drafter else ()

    @property
    def drafts(self) -> bool:
        """Whether this drafts at all."""
        return self.num_draft_tokens > 0

    @property
    def without_drafts(self) -> Speculator:
        """Plain decoding by the same target."""
        return dataclasses.replace(
            self, drafter=None, method="none", num_draft_tokens=0, lengths=()
        )

    @property
    def pending_rows(self) -> int:
        """Rows of `DecodeState.pending_tokens`: as many tokens as can be confirmed between two
        drafts, which are K+1 where every step drafts."""
        chains = not drafts_tree(self.method)
        rests = self.lengths or (self.drafter and chains and looks_up(self.method))
        return max(self.num_draft_tokens + 1, MOST_PENDING if rests else 0)

    def required_capacity(self, prompt_size: int, max_new_tokens: int) -> int:
        """Cache slots that no write of a generation can leave.

        A verification writes up to position prompt + new + K - 1, a draft of P pending rows up
        to prompt + new + P + K - 3. Rounded up so that near sizes share a compilation.
        """
        needed = prompt_size + max_new_tokens + self.pending_rows + self.num_draft_tokens
        return -(-needed // 64) * 64

    def history_size(self, most_tokens: int) -> int:
        """Width of `DecodeState.history` for texts of so many tokens: of those past the newest,
        a verification's K+1 are written."""
        return most_tokens + self.num_draft_tokens + 1 if looks_up(self.method) else 0

    def init_state(
        self,
        batch: int,
        prompt_size: int,
        max_new_tokens: int,
        step_costs: Float[Array, "lengths"] | None = None,
        rates: Float[Array, "rates"] | None = None,
    ) -> DecodeState:
        """Empty caches and counters for `batch` sequences.

        step_costs: of each of `lengths`, in milliseconds; None = equal, so that the longest
          draft is always taken.
        rates: what is known of the acceptance of each draft; None = FIRST_RATE.

        The caches' spans: from a step's first position a verification writes K+1 positions
        and a draft of P pending rows up to P + K - 1, of which the next step may begin at any
        but the first.
        """
        capacity = self.required_capacity(prompt_size, max_new_tokens)
        k, dtype = self.num_draft_tokens, jnp.dtype(self.dtype)
        width = self.drafter.feature_size if self.drafter else 0
        num_rates = k if self.lengths else 0
        draft_cache = None
        if self.drafter:
            span = self.pending_rows + k - 1
            draft_cache = KVCache.init(self.drafter.block, batch, capacity, dtype, span=span)

        def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
            return jnp.zeros((batch, *shape), dtype)

        return DecodeState(
            target_cache=KVCache.init(self.target.block, batch, capacity, dtype, span=k + 1),
            draft_cache=draft_cache,
            length=zeros(),
            last_token=zeros(),
            pending_tokens=zeros(self.pending_rows),
            pending_features=zeros(self.pending_rows, width, dtype=dtype),
            pending_count=zeros(),
            history=zeros(self.history_size(prompt_size + max_new_tokens)),
            output=zeros(max_new_tokens + k + 1),
            emitted=zeros(),
            finished=zeros(dtype=bool),
            hit_eos=zeros(dtype=bool),
            num_drafts=zeros(),
            num_draft_tokens=zeros(),
            accepted_per_position=zeros(k),
            gave_up=zeros(dtype=bool),
            rates=jnp.zeros((batch, num_rates), jnp.float32)
            + (FIRST_RATE if rates is None else rates),
            step_costs=jnp.ones(len(self.lengths)) if step_costs is None else step_costs,
        )

    # --- one step -----------------------------------------------------------------

    def step(self, params: Params, state: DecodeState, requests: RequestArrays) -> DecodeState:
        """Draft, verify and commit once, for every row that is not finished."""
        if not self.lengths:
            return self._step(params, state, requests, self.num_draft_tokens)
        full = state.pending_count >= self.pending_rows
        choice, gives_up = draft_length.choose(
            state.rates, ~state.finished, state.gave_up, full, state.step_costs, self.lengths
        )
        state = dataclasses.replace(state, gave_up=state.gave_up | gives_up)
        if drafts_tree(self.method):
            return self._tree_step(params, state, requests, choice > 0)

        def step(k: int, state: DecodeState) -> DecodeState:
            return self._step(params, state, requests, k)

        return draft_length.switch(
            choice, [functools.partial(step, k) for k in self.lengths], state
        )

    def _step(
        self, params: Params, state: DecodeState, requests: RequestArrays, k: int
    ) -> DecodeState:
        """A step of k drafts."""
        drawn = self._draws(state, requests, k)
        with jax.named_scope("draft"):
            drafted = self.draft(params, state, requests, drawn.rows(slice(k)), k)
        return self._confirm(params, state, requests, drafted, drawn)

    def _tree_step(
        self, params: Params, state: DecodeState, requests: RequestArrays, drafts: Bool[Array, ""]
    ) -> DecodeState:
        """A step of no drafts, or of as many of a tree's nodes as are worth it."""
        k = self.num_draft_tokens
        drawn = self._draws(state, requests, k)

        none = jnp.zeros((state.length.shape[0], k), jnp.int32)
        tree = DraftTree(none, none, none.astype(jnp.float32))
        nothing = Drafted(none, None, jnp.bool_(False), tree=tree)

        def some(before: tuple[DecodeState, Drafted]) -> tuple[DecodeState, Drafted]:
            state, _ = before
            drafted = self.draft(params, state, requests, drawn.rows(slice(k)), k)
            kept = dataclasses.replace(state, draft_cache=drafted.cache)
            return kept, dataclasses.replace(drafted, cache=None)

        with jax.named_scope("draft"):
            chosen = jnp.where(drafts, 0, 1)
            state, drafted = draft_length.switch(chosen, [some], (state, nothing))
        assert drafted.tree is not None
        sizes, costs = self.lengths[1:], state.step_costs[1:]
        nodes = draft_length.choose_nodes(
            drafted.tree.scores, ~state.finished, state.gave_up, costs, sizes
        )

        def confirm(nodes: int, state: DecodeState) -> DecodeState:
            some = dataclasses.replace(drafted.best(nodes), cache=state.draft_cache)
            return self._confirm(params, state, requests, some, drawn)

        choice = jnp.where(drafts, 1 + nodes, 0)
        return draft_length.switch(
            choice, [functools.partial(confirm, n) for n in self.lengths], state
        )

    def _draws(self, state: DecodeState, requests: RequestArrays, k: int) -> Draws:
        """Row j of a chain's verification decides the token at position n + 1 + j."""
        positions = state.length[:, None] + 1 + jnp.arange(k + 1)
        with jax.named_scope("verify"):
            return sampling.draws(requests, positions, self.target.vocab_size)

    def _confirm(
        self,
        params: Params,
        state: DecodeState,
        requests: RequestArrays,
        drafted: Drafted,
        drawn: Draws,
    ) -> DecodeState:
        """The target's pass over what was drafted, and what of it stands."""
        k = drafted.tokens.shape[1]
        with jax.named_scope("verify"):
            tree = drafted.tree
            sees = None if tree is None else tree.sees
            tokens = jnp.concatenate([state.last_token[:, None], drafted.tokens], axis=1)
            out = self.networks(params).of_target(
                tokens, state.length, state.target_cache, self.aux_layer_ids, None, sees
            )
            if self.verification == "rejection" and k:
                verified = self._reject(params, drafted, out.hidden, requests, state.length)
            elif tree is None:
                drawn = drawn.rows(slice(k + 1))
                choices = self.choose(params, out.hidden, requests, drawn)
                verified = verify_coupled(drafted.tokens, choices)
            else:
                choices = self.choose(params, out.hidden, requests, drawn, depths(tree.sees))
                verified, rows = verify_tree(tree, choices)
                out = _only(out, state.length, rows)
        with jax.named_scope("commit"):
            active = ~state.finished
            stood = verified.count - 1
            accepted = (jnp.arange(self.num_draft_tokens) < stood[:, None]) & active[:, None]
            state = dataclasses.replace(
                state,
                target_cache=out.cache,
                draft_cache=drafted.cache,
                num_drafts=state.num_drafts + active * (1 if k else 0),
                num_draft_tokens=state.num_draft_tokens + active * k,
                accepted_per_position=state.accepted_per_position + accepted,
            )
            if self.lengths:
                drafting = active & ~state.gave_up
                rates = draft_length.observe(state.rates, stood, k, drafting)
                state = dataclasses.replace(state, rates=rates)
            return self.commit(state, requests, verified, out.features, drafted.asked)

    def commit(
        self,
        state: DecodeState,
        requests: RequestArrays,
        verified: Verified,
        features: Float[Array, "batch rows raw"],
        asked: Bool[Array, ""],
    ) -> DecodeState:
        """See `commit.commit`."""
        eos, history = self.target.eos_token_ids, looks_up(self.method)
        return commit(state, requests, verified, features, asked, eos, keeps_history=history)

    def draft(
        self,
        params: Params,
        state: DecodeState,
        requests: RequestArrays,
        drawn: Draws,
        k: int,
    ) -> Drafted:
        """k tokens for every sequence; see `Drafting.draft`. Of a tree k is the number of nodes,
        at as many depths as the drafter was trained for."""
        nodes, num_depths = 0, k
        if self.drafter and drafts_tree(self.method):
            nodes, num_depths = k, min(k, self.drafter.trained_num_draft_tokens or k)
        return Drafting(
            self.networks(params),
            self.method,
            num_depths,
            self.draft_sampling,
            self.verification,
            nodes,
        ).draft(state, requests, drawn)

    # --- the target's choices -----------------------------------------------------

    def choose(
        self,
        params: Params,
        hidden: Float[Array, "batch rows hidden"],
        requests: RequestArrays,
        drawn: Draws,
        at: Int[Array, "batch rows"] | None = None,
    ) -> Int[Array, "batch rows"]:
        """The target's own token at every row. Where no row samples nothing is made of
        the logits but their argmax. `at`: which of `drawn` a row is drawn with; None = its own."""
        networks = self.networks(params)

        def apply(method: str) -> Any:
            return networks.of_target(hidden, method=method)

        def sample() -> Array:
            noise = drawn if at is None else drawn.at(at)
            return sampling.sample(apply("logits"), requests, noise)

        return jax.lax.cond(jnp.all(requests.greedy), lambda: apply("best"), sample)

    def _reject(
        self,
        params: Params,
        drafted: Drafted,
        hidden: Array,
        requests: RequestArrays,
        length: Array,
    ) -> Verified:
        """The classical rule, with q over the target's vocabulary where drafts were sampled."""
        drafts, draft_logits = drafted.tokens, drafted.logits
        positions = length[:, None] + 1 + jnp.arange(drafts.shape[1] + 1)
        reduced = self.drafter and self.drafter.draft_vocab_size < self.drafter.vocab_size
        if draft_logits is not None and reduced:
            ids = params["drafter"]["draft_to_target"]
            full = jnp.full((*draft_logits.shape[:-1], self.target.vocab_size), sampling.MASKED)
            draft_logits = full.at[..., ids].set(draft_logits)
        logits = self.networks(params).of_target(hidden, method="logits")
        accept = sampling.uniform_noise(requests, positions[:, :-1], sampling.STREAM_ACCEPT)
        if own_kernel(self.target.vocab_size, drafted=draft_logits is not None):
            keys = sampling.noise_keys(requests, positions, sampling.STREAM_RECOVER)
            if draft_logits is not None:
                draft_logits = jnp.pad(draft_logits, ((0, 0), (0, 1), (0, 0)))
            run = per_device(reject_drafts, PartitionSpec(), PartitionSpec())
            decided = run(logits, requests.filters, keys, drafts, draft_logits, accept)
            return after_rejection(drafts, *decided)
        processed = sampling.process_logits(logits, requests)
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
        networks = self.networks(params)
        out = networks.of_target(tokens, start, target_cache, self.aux_layer_ids, counts)
        if self.drafter is None:
            return out, None
        features = networks.of_drafter(out.features, method="project")
        embeddings = networks.draft_embed(following)
        _, written = networks.of_drafter(embeddings, features, start, draft_cache, counts)
        return out, written

    def networks(self, params: Params) -> Networks:
        """Both networks with their parameters."""
        return Networks(self.target, self.drafter, self.dtype, params)


def _only(
    out: DecoderOutput, start: Int[Array, "batch"], rows: Int[Array, "batch rows"]
) -> DecoderOutput:
    """Of some rows of a tree features and cache, as if they had been verified as a chain."""
    layers: Any = [layer.moved(start, rows) for layer in out.cache.layers]
    return dataclasses.replace(
        out,
        features=jnp.take_along_axis(out.features, rows[..., None], axis=1),
        cache=out.cache.with_layers(layers),
    )

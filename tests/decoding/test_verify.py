"""The two rules of verification emit the target's own distribution, whatever was drafted."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import SamplingParams
from peagle_jax.decoding import sampling
from peagle_jax.decoding.verify import Verified, verify_coupled, verify_rejection
from peagle_jax.models.cache import KVCache
from peagle_jax.models.decoder import Decoder
from tests.decoding import exact, tiny
from tests.decoding.exact import SIGNIFICANCE, p_value, probabilities
from tests.decoding.tiny import Tiny

VOCAB, K = 6, 2
ROWS = 60_000  # half of them sampled where greedy rows are mixed in

# Target and drafter: logits of the first token, of the second after each first, of the
# third after each second. The drafter is the target with noise: often right, often wrong.
_rng = np.random.default_rng(2)
TARGET = [
    _rng.normal(0, 1.2, shape).astype(np.float32)
    for shape in ((VOCAB,), (VOCAB, VOCAB), (VOCAB, VOCAB))
]
DRAFTER = [(logits + _rng.normal(0, 0.8, logits.shape)).astype(np.float32) for logits in TARGET[:K]]
DRAFTER[0][2] = -np.inf  # a token that the draft vocabulary does not have
LOGITS = jax.tree.map(jnp.asarray, (TARGET, DRAFTER))
# A stream of noise that the product does not use.
STREAM_CONTINUE = 7

CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=1.0, top_p=0.75),
    SamplingParams(temperature=1.0, min_p=0.25),
    SamplingParams(temperature=1.4, top_k=5, top_p=0.9, min_p=0.1),
]


def names(params: SamplingParams) -> str:
    return f"t{params.temperature}-k{params.top_k}-p{params.top_p}-m{params.min_p}"


def correct(drafts, q, mode, processed, table, noise, raw):
    """As Speculator calls it."""
    positions = 1 + jnp.broadcast_to(jnp.arange(K + 1), processed.shape[:2])
    accept = sampling.uniform_noise(table, positions[:, :-1], sampling.STREAM_ACCEPT)
    recover = sampling.gumbel_noise(table, positions, VOCAB, sampling.STREAM_RECOVER)
    draft_logits = q if mode == "sample" else None
    return verify_rejection(drafts, draft_logits, processed, table.greedy, accept, recover)


def coupled(drafts, q, mode, processed, table, noise, raw):
    return verify_coupled(drafts, sampling.choose(processed, noise))


def residual_of_p(drafts, q, mode, processed, table, noise, raw):
    """Broken: what is recovered is drawn from p, not from what q left of it."""
    right = correct(drafts, q, mode, processed, table, noise, raw)
    positions = 1 + jnp.broadcast_to(jnp.arange(K + 1), processed.shape[:2])
    recover = sampling.gumbel_noise(table, positions, VOCAB, sampling.STREAM_RECOVER)
    at_end = jnp.arange(K + 1) == right.count[:, None] - 1
    return Verified(
        jnp.where(at_end, sampling.choose(processed, recover), right.tokens), right.count
    )


def temperature_ignored(drafts, q, mode, processed, table, noise, raw):
    """Broken: the target's logits as they came."""
    return correct(drafts, q, mode, raw, table, noise, raw)


def everything_accepted(drafts, q, mode, processed, table, noise, raw):
    """Broken: acceptance without a coin."""
    greedy, accept = table.greedy, jnp.zeros(drafts.shape)
    return verify_rejection(drafts, q, processed, greedy, accept, noise)


def argmaxes_taken_as_samples(drafts, q, mode, processed, table, noise, raw):
    """Broken: p / q for a draft that q would not have given so often."""
    return correct(drafts, q, "sample", processed, table, noise, raw)


def noise_of_the_drafts_again(drafts, q, mode, processed, table, noise, raw):
    """Broken: recovery with the noise that the rejected draft was drawn with."""
    positions = 1 + jnp.broadcast_to(jnp.arange(K + 1), processed.shape[:2])
    accept = sampling.uniform_noise(table, positions[:, :-1], sampling.STREAM_ACCEPT)
    return verify_rejection(drafts, q, processed, table.greedy, accept, noise)


@functools.partial(jax.jit, static_argnames=("verify", "mode"))
def emit(table, target, drafter, verify, mode):
    """Tokens 1 and 2 of every request, how many came from the step, and the drafts.

    Where the first draft fell, the second token is drawn from its distribution: what the
    next step would do."""
    rows = table.seed.shape[0]
    positions = 1 + jnp.broadcast_to(jnp.arange(K + 1), (rows, K + 1))
    noise = sampling.gumbel_noise(table, positions, VOCAB)

    def draft(logits, j):
        processed = sampling.process_logits(logits[:, None], table)[:, 0]
        if mode == "greedy":
            return jnp.argmax(logits, -1).astype(jnp.int32), processed
        return sampling.choose(processed, noise[:, j]), processed

    first, q0 = draft(jnp.broadcast_to(drafter[0], (rows, VOCAB)), 0)
    second, q1 = draft(drafter[1][first], 1)
    drafts, q = jnp.stack([first, second], axis=1), jnp.stack([q0, q1], axis=1)
    raw = jnp.stack(
        [jnp.broadcast_to(target[0], (rows, VOCAB)), target[1][first], target[2][second]], axis=1
    )
    processed = sampling.process_logits(raw, table)
    verified = verify(drafts, q, mode, processed, table, noise, raw)
    after = sampling.process_logits(target[1][verified.tokens[:, :1]], table)
    own = sampling.gumbel_noise(table, positions[:, 1:2], VOCAB, STREAM_CONTINUE)
    continued = sampling.choose(after, own)[:, 0]
    tokens = jnp.stack(
        [verified.tokens[:, 0], jnp.where(verified.count > 1, verified.tokens[:, 1], continued)],
        axis=1,
    )
    return tokens, verified.count, drafts


def joint(params: SamplingParams) -> np.ndarray:
    """Exact probability of each pair of tokens."""
    first = probabilities(TARGET[0], params)
    return first[:, None] * probabilities(TARGET[1], params)


def emitted(params, verify, mode):
    """Every second row greedy. Checks those; gives the sampled ones' tokens, counts, drafts."""
    greedy = np.arange(ROWS) % 2 == 1
    table = exact.table(params, np.arange(ROWS), greedy)
    tokens, count, drafts = map(np.asarray, emit(table, *LOGITS, verify, mode))
    assert ((count >= 1) & (count <= K + 1)).all()
    best = TARGET[0].argmax()
    if verify in (correct, coupled):
        assert (tokens[greedy] == [best, TARGET[1][best].argmax()]).all()
        right = DRAFTER[0].argmax() == best
        assert ((count[greedy] > 1) == right).all()
    return tokens[~greedy], count[~greedy], drafts[~greedy]


@pytest.mark.parametrize("mode", ["sample", "greedy"])
@pytest.mark.parametrize("verify", [correct, coupled])
@pytest.mark.parametrize("params", CASES, ids=names)
def test_tokens_follow_the_target(params, verify, mode) -> None:
    tokens, count, drafts = emitted(params, verify, mode)
    expected = joint(params)
    assert p_value(tokens[:, 0], expected.sum(axis=1)) > SIGNIFICANCE
    assert p_value(tokens, expected) > SIGNIFICANCE
    # The rows whose second token came from the step itself, by what it decided.
    both = tokens[count > 1]
    assert len(both) > ROWS // 20
    np.testing.assert_array_equal(both[:, 0], drafts[count > 1, 0])
    # All drafts accepted: the bonus token comes on top.
    assert (count == K + 1).any()


@pytest.mark.parametrize("mode", ["sample", "greedy"])
@pytest.mark.parametrize("params", CASES, ids=names)
def test_rejection_accepts_as_often_as_can_be(params, mode) -> None:
    """p(accept) = sum over tokens of min(p, q), the most that any rule reaches."""
    _, count, drafts = emitted(params, correct, mode)
    p = probabilities(TARGET[0], params)
    if mode == "greedy":
        q = np.eye(VOCAB)[DRAFTER[0].argmax()]
    else:
        q = probabilities(DRAFTER[0], params)
    rate = np.minimum(p, q).sum()
    error = np.sqrt(rate * (1 - rate) / len(count))
    assert abs((count > 1).mean() - rate) <= 5 * error
    assert 0.1 < rate < 1
    assert p_value(drafts[:, 0], q) > SIGNIFICANCE


@pytest.mark.parametrize("params", CASES[:2], ids=names)
def test_coupled_drafts_are_accepted_more_often_than_by_chance(params) -> None:
    """Sharing the noise is what makes sampled drafts agree: independent draws agree with
    probability sum p q; the rejection rule bounds every rule from above."""
    _, count, _ = emitted(params, coupled, "sample")
    p, q = probabilities(TARGET[0], params), probabilities(DRAFTER[0], params)
    assert (p * q).sum() + 0.1 < (count > 1).mean() <= np.minimum(p, q).sum() + 0.01


@pytest.mark.parametrize(
    ("verify", "mode"),
    [
        (residual_of_p, "sample"),
        (residual_of_p, "greedy"),
        (temperature_ignored, "sample"),
        (everything_accepted, "sample"),
        (argmaxes_taken_as_samples, "greedy"),
        (noise_of_the_drafts_again, "sample"),
    ],
)
def test_broken_verifiers_fail_the_check(verify, mode) -> None:
    params = SamplingParams(temperature=0.6)
    tokens, _, _ = emitted(params, verify, mode)
    assert p_value(tokens, joint(params)) < SIGNIFICANCE


# --- by hand ------------------------------------------------------------------------


def test_coupled_counts_up_to_the_first_difference() -> None:
    drafts = jnp.array([[1, 2, 3], [1, 2, 9], [1, 9, 3], [9, 2, 3]])
    choices = jnp.broadcast_to(jnp.array([1, 2, 3, 4]), (4, 4))
    verified = verify_coupled(drafts, choices)
    assert verified.count.tolist() == [4, 3, 2, 1]
    np.testing.assert_array_equal(verified.tokens, choices)


def test_rejection_by_hand() -> None:
    """p(d) = 0.5, q(d) = 0.8: accepted below 0.625; then nothing of d is left to recover."""
    p, q = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.8, 0.1, 0.1])
    accept = jnp.array([[0.62], [0.63], [0.63]])
    recover = jnp.zeros((3, 2, 3)).at[2, 0].set(jnp.array([9.0, 0.0, 5.0]))
    verified = verify_rejection(
        jnp.zeros((3, 1), jnp.int32),
        jnp.log(jnp.broadcast_to(q, (3, 1, 3))),
        jnp.log(jnp.broadcast_to(p, (3, 2, 3))),
        jnp.zeros(3, bool),
        accept,
        recover,
    )
    assert verified.count.tolist() == [2, 1, 1]
    # The bonus, the larger residual (0.2 against 0.1), and noise that turns it round.
    assert verified.tokens[0].tolist() == [0, 0]
    assert verified.tokens[1:, 0].tolist() == [1, 2]


def test_a_draft_like_the_target_is_always_accepted() -> None:
    """p == q: accepted even with a coin next to 1; and nothing becomes NaN."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (64, 1, VOCAB)), jnp.float32)
    drafts = jnp.argmax(logits, -1).astype(jnp.int32)
    both = jnp.concatenate([logits, logits], axis=1)
    accept = jnp.full((64, 1), 1 - 2.0**-24)
    recover = jnp.zeros((64, 2, VOCAB))
    verified = verify_rejection(drafts, logits, both, jnp.zeros(64, bool), accept, recover)
    assert (verified.count == 2).all()
    np.testing.assert_array_equal(verified.tokens[:, 0], drafts[:, 0])


def test_greedy_rows_divide_by_nothing() -> None:
    """Temperature 0 beside temperature 1: the argmax alone counts, with any draft logits."""
    logits = jnp.asarray([[[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]]] * 2)
    verified = verify_rejection(
        jnp.array([[1], [0]]),
        jnp.full((2, 1, 3), -jnp.inf).at[:, :, 0].set(0.0),
        logits,
        jnp.ones(2, bool),
        jnp.full((2, 1), 0.999),
        jnp.zeros((2, 2, 3)),
    )
    assert verified.count.tolist() == [2, 1]
    assert verified.tokens[0].tolist() == [1, 0]
    assert verified.tokens[1, 0] == 1


# --- through the whole loop ---------------------------------------------------------

LOOP_VOCAB, LOOP_ROWS, LOOP_RUNS = 7, 4096, 6
PROMPT = (3, 1, 4, 1)


@pytest.fixture(scope="module")
def models() -> Tiny:
    return tiny.make(vocab_size=LOOP_VOCAB, draft_vocab_size=5, head_noise=0.5)


@pytest.fixture(scope="module")
def next_logits(models) -> list[np.ndarray]:
    return logits_after_prompt(models)


def logits_after_prompt(models: Tiny) -> list[np.ndarray]:
    """The target's logits after PROMPT, after each next token, after each pair of them."""
    a, b = np.divmod(np.arange(LOOP_VOCAB**2), LOOP_VOCAB)
    tokens = np.column_stack([np.tile(PROMPT, (len(a), 1)), a, b]).astype(np.int32)
    network, variables = Decoder(models.target), {"params": models.trees["target"]}
    cache = KVCache.init(models.target.block, len(a), tokens.shape[1], jnp.float32)
    out = network.apply(variables, jnp.asarray(tokens), jnp.zeros(len(a), jnp.int32), cache)
    logits = np.asarray(network.apply(variables, out.hidden, method="logits"))[:, -3:]
    return [logits[0, 0], logits[::LOOP_VOCAB, 1], logits[:, 2]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, max_new_tokens=3),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.95, min_p=0.05, max_new_tokens=3),
    ],
    ids=names,
)
@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("p-eagle", "sample"),
        ("p-eagle", "greedy"),
        ("eagle3", "sample"),
        ("prompt-lookup", "greedy"),
    ],
)
def test_rejection_in_the_loop(method, mode, params, models, next_logits) -> None:
    assert_distribution(method, mode, params, models, next_logits)


def test_rejection_with_chosen_draft_lengths(models, next_logits) -> None:
    """What a step drafts depends on what was accepted before, and on no noise to come."""
    params = SamplingParams(temperature=1.0, max_new_tokens=3)
    costs = jnp.array([1.0, 1.05, 1.1])
    assert_distribution("p-eagle", "sample", params, models, next_logits, (0, 1, K), costs)


def assert_distribution(
    method: str,
    mode: str,
    params: SamplingParams,
    models: Tiny,
    next_logits: list[np.ndarray],
    lengths: tuple[int, ...] = (),
    step_costs: Any = None,
    runs: int = LOOP_RUNS,
) -> None:
    """Three tokens a request: the prompt's own, and two of the first speculative step(s)."""
    speculator = models.speculator(
        method, K, draft_sampling=mode, verification="rejection", lengths=lengths
    )
    greedy = np.arange(LOOP_ROWS) % 8 == 0
    samples, accepted, drafts = [], np.zeros(K), 0
    for run in range(runs):
        seeds = run * LOOP_ROWS + np.arange(LOOP_ROWS)
        batch = tiny.make_batch([PROMPT] * LOOP_ROWS, [params] * LOOP_ROWS, len(PROMPT), 3)
        table = exact.table(params, seeds, greedy)
        result = tiny.run(models, speculator, batch, table, step_costs=step_costs)
        assert (result.lengths == 3).all()
        best = [next_logits[0].argmax()]
        best.append(next_logits[1][best[0]].argmax())
        best.append(next_logits[2][best[0] * LOOP_VOCAB + best[1]].argmax())
        assert (result.tokens[greedy] == best).all()
        samples.append(result.tokens[~greedy])
        accepted += result.accepted[~greedy].sum(axis=0)
        drafts += result.num_drafts[~greedy].sum()
    tokens = np.concatenate(samples)
    assert len(tokens) == runs * LOOP_ROWS * 7 // 8
    first, second, third = (probabilities(logits, params) for logits in next_logits)
    pairs = first[:, None] * second
    triples = pairs[..., None] * third.reshape(LOOP_VOCAB, LOOP_VOCAB, LOOP_VOCAB)
    assert p_value(tokens[:, 1], pairs.sum(axis=0)) > SIGNIFICANCE
    assert p_value(tokens[:, :2], pairs) > SIGNIFICANCE
    assert p_value(tokens, triples) > SIGNIFICANCE
    # Both depths were accepted and refused, or the rule was not at work.
    assert (accepted > 0.1 * drafts).all()
    assert (accepted < 0.9 * drafts).all()

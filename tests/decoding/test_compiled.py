"""One program a bucket; nothing leaves the device while it runs; caches are reused in place."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import SamplingParams
from peagle_jax.decoding import generate
from tests.decoding import tiny
from tests.decoding.tiny import PARAMS, Tiny

ROWS, PROMPT_SIZE, NEW_TOKENS = 4, 16, 16
METHODS = [("p-eagle", 4), ("eagle3", 2), ("none", 0)]
# How a compiled program talks to its host.
HOST = re.compile(r"callback|infeed|outfeed|\bsend\(|\brecv\(|send-done|recv-done")


@pytest.fixture(scope="module")
def models() -> Tiny:
    return tiny.make(draft_vocab_size=16, eos_token_ids=(4,))


def inputs(seed: int, first_params: int, lengths: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Prompts, lengths and parameters of a batch, all different from another seed's."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, tiny.VOCAB, n).tolist() for n in lengths]
    params = [
        SamplingParams(
            max_new_tokens=NEW_TOKENS - row,
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            seed=int(rng.integers(2**32)),
            ignore_eos=bool(row % 2),
        )
        for row, p in enumerate((PARAMS * 2)[first_params : first_params + ROWS])
    ]
    batch = tiny.make_batch(prompts, params, PROMPT_SIZE, NEW_TOKENS)
    return jax.block_until_ready(jax.device_put(batch.arrays()))


def several_inputs() -> list[tuple[Any, Any, Any]]:
    lengths = [(1, 5, 16, 2), (16, 16, 16, 16), (3, 1, 1, 9), (7, 8, 2, 4)]
    return [inputs(i, 2 * i, n) for i, n in enumerate(lengths)]


def traces(function: Any) -> int:
    return function._cache_size()


def static(models: Tiny, method: str, k: int) -> dict[str, Any]:
    return {"speculator": models.speculator(method, k), "max_new_tokens": NEW_TOKENS}


@pytest.mark.parametrize(("method", "k"), METHODS)
def test_one_trace_a_bucket(method, k, models) -> None:
    """Prompts, lengths, temperatures, filters, seeds and limits are data, not programs."""
    first, *others = several_inputs()
    options = static(models, method, k)
    before = traces(generate.jit_generate_tokens)
    answers = [generate.jit_generate_tokens(models.params(method), *first, **options)[0]]
    assert traces(generate.jit_generate_tokens) == before + 1
    with jax.no_tracing():
        for one in others:
            answers.append(generate.jit_generate_tokens(models.params(method), *one, **options)[0])
    assert traces(generate.jit_generate_tokens) == before + 1
    assert len({np.asarray(tokens).tobytes() for tokens in answers}) == len(answers)


def test_a_trace_is_seen_where_it_happens(models) -> None:
    args = (models.params("none"), *several_inputs()[0])
    larger = {**static(models, "none", 0), "max_new_tokens": 2 * NEW_TOKENS}
    with jax.no_tracing(), pytest.raises(RuntimeError, match="no_tracing"):
        generate.jit_generate_tokens(*args, **larger)


@pytest.mark.parametrize(("method", "k"), METHODS[:1])
def test_one_trace_a_bucket_between_visits(method, k, models) -> None:
    first, *others = several_inputs()
    params, options = models.params(method), static(models, method, k)
    prefills, advances = (traces(f) for f in (generate.jit_prefill, generate.jit_advance))

    def steps(prompts: Any, lengths: Any, table: Any) -> Any:
        state = generate.jit_prefill(params, prompts, lengths, table, **options)
        for _ in range(3):
            state = generate.jit_advance(params, state, table, lengths, num_steps=2, **options)
        return state

    steps(*first)
    with jax.no_tracing():
        states = [steps(*one) for one in others]
    assert traces(generate.jit_prefill) == prefills + 1
    assert traces(generate.jit_advance) == advances + 1
    # Six steps were taken, no more, by rows that still go on.
    for state in states:
        assert state.num_drafts.max() == 6 or state.finished.all()


@pytest.mark.parametrize(("method", "k"), METHODS)
def test_loop_stays_on_the_device(method, k, models) -> None:
    args = jax.device_put((models.params(method), *several_inputs()[2]))
    program = generate.jit_generate_tokens.lower(*args, **static(models, method, k)).compile()
    text = str(program.as_text())
    assert " while(" in text
    assert HOST.findall(text) == []
    with jax.transfer_guard("disallow"):
        tokens, lengths, _ = jax.block_until_ready(program(*args))
    assert int(lengths.max()) == NEW_TOKENS
    assert int(tokens.max()) > 0


@pytest.mark.parametrize("callback", [jax.debug.callback, jax.experimental.io_callback])
def test_the_host_is_seen_where_it_is_asked(callback) -> None:
    """What the test above looks for is what a callback in a loop compiles to."""

    def body(i: Any, x: Any) -> Any:
        if callback is jax.debug.callback:
            callback(lambda _: None, x)
            return x + 1
        return callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x)

    program = jax.jit(lambda x: jax.lax.fori_loop(0, 3, body, x)).lower(jnp.float32(0)).compile()
    assert HOST.search(str(program.as_text()))


def test_a_transfer_is_seen_where_it_happens() -> None:
    add = jax.jit(lambda x: x + 1)
    add(jnp.ones(3))
    with (
        jax.transfer_guard("disallow"),
        pytest.raises(RuntimeError, match="Disallowed host-to-device"),
    ):
        add(np.ones(3, np.float32))


@pytest.mark.parametrize(("method", "k"), METHODS)
def test_caches_are_written_in_place(method, k, models) -> None:
    """`jit_advance` gives its state's buffers back: no copy of a cache between visits."""
    params, options = models.params(method), static(models, method, k)
    prompts, lengths, table = several_inputs()[0]
    state = generate.jit_prefill(params, prompts, lengths, table, **options)
    caches = jax.tree.leaves((state.target_cache, state.draft_cache))
    assert len(caches) == (6 if k else 4)
    places = {leaf.unsafe_buffer_pointer() for leaf in caches}
    program = generate.jit_advance.lower(
        params, state, table, lengths, num_steps=1, **options
    ).compile()
    assert "input_output_alias" in str(program.as_text())
    size = sum(leaf.nbytes for leaf in caches)
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= size
    after = program(params, state, table, lengths)
    assert all(leaf.is_deleted() for leaf in caches)
    assert {
        leaf.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves((after.target_cache, after.draft_cache))
    } == places
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, table)))


def test_a_step_of_one_row_copies_no_cache(models) -> None:
    """XLA on CPU makes a one-row update once for each of its readers, each on a copy, if it can."""
    params = [SamplingParams(max_new_tokens=NEW_TOKENS)]
    arguments = tiny.make_batch([[1, 2, 3]], params, PROMPT_SIZE, NEW_TOKENS).arrays()
    options = static(models, "none", 0)
    program = generate.jit_generate_tokens.lower(
        models.params("none"), *arguments, **options
    ).compile()
    block = models.target.block
    capacity = options["speculator"].required_capacity(PROMPT_SIZE, NEW_TOKENS)
    cache = rf"f32\[1,{block.num_kv_heads},{capacity},{block.head_dim}\]"
    text = str(program.as_text())
    assert re.search(rf"= {cache}\S* fusion\(", text)
    # What the loop carries, or a copy of it.
    assert not re.findall(rf"= {cache}\S* copy\(%(?:get-tuple-element|copy)", text)

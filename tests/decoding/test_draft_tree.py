"""Draft trees against definitions in plain Python."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.api import make_speculator
from peagle_jax.decoding import draft_length, draft_tree
from peagle_jax.decoding.draft_tree import DraftTree
from peagle_jax.decoding.verify import verify_tree
from peagle_jax.errors import InputError
from peagle_jax.runner import Pair
from tests.decoding import tiny

VOCAB = 12


def branches(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    """Each node's tokens from the root to it, in the nodes' order."""
    known: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        assert parent < len(known), "a node came before its parent"
        known.append((*known[parent], token))
    return known[1:]


def best_tokens(seed: int, batch: int, depths: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.gumbel(size=(batch, depths, VOCAB)) * 1.5
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-log_probs, axis=-1)[..., :ranks]
    return np.take_along_axis(log_probs, order, -1).astype(np.float32), order


@pytest.mark.parametrize(("nodes", "depths"), [(1, 1), (3, 2), (7, 4), (15, 3)])
def test_the_likeliest_nodes_are_taken(nodes: int, depths: int) -> None:
    log_probs, tokens = best_tokens(nodes, 6, depths, min(nodes, VOCAB))
    tree = draft_tree.grow(jnp.asarray(log_probs), jnp.asarray(tokens), nodes)
    for row in range(6):
        of_depth = [
            dict(zip(t, p, strict=True)) for t, p in zip(tokens[row], log_probs[row], strict=True)
        ]
        scores = {
            path: sum(float(of_depth[d][token]) for d, token in enumerate(path))
            for length in range(1, depths + 1)
            for path in itertools.product(*(tokens[row, d].tolist() for d in range(length)))
        }
        likeliest = sorted(scores, key=lambda path: -scores[path])[:nodes]
        assert sorted(branches(tree, row)) == sorted(likeliest)


def test_what_was_looked_up_is_a_branch_beside_them() -> None:
    """Found with three tokens it takes nearly all nodes, found with none not one."""
    log_probs, tokens = best_tokens(3, 2, 3, 7)
    log_probs[:, 0, 0] = np.log(0.3)
    looked_up = jnp.array([[50, 51, 52, 53, 54, 55, 56]] * 2)
    tree = draft_tree.grow(
        jnp.asarray(log_probs), jnp.asarray(tokens), 7, (looked_up, jnp.array([3, 0]))
    )
    branch = [tuple(range(50, 50 + n)) for n in range(1, 8)]
    taken = [path for path in branches(tree, 0) if path[0] == 50]
    assert taken == branch[: len(taken)]
    assert len(taken) >= 5
    assert not [path for path in branches(tree, 1) if path[0] == 50]


@pytest.mark.parametrize(("nodes", "depths", "count"), [(1, 1, 1), (2, 2, 3), (3, 3, 6)])
def test_candidates_hold_every_node_that_can_be_taken(nodes: int, depths: int, count: int) -> None:
    found = draft_tree.candidates(nodes, depths, nodes)
    assert len(found) == count
    taken = set()
    for seed in range(300):
        log_probs, _ = best_tokens(seed, 1, depths, nodes)
        ranks = np.broadcast_to(np.arange(nodes), log_probs.shape)
        tree = draft_tree.grow(jnp.asarray(log_probs), jnp.asarray(ranks), nodes)
        taken |= set(branches(tree, 0))
    assert taken == set(found)


def test_fewer_nodes_are_the_best_of_them() -> None:
    log_probs, tokens = best_tokens(5, 6, 3, 9)
    arrays = jnp.asarray(log_probs), jnp.asarray(tokens)
    tree, few = draft_tree.grow(*arrays, 9).best(4), draft_tree.grow(*arrays, 4)
    for row in range(6):
        assert branches(tree, row) == branches(few, row)
    np.testing.assert_array_equal(tree.scores, few.scores)


def test_as_many_nodes_as_are_worth_it() -> None:
    """Expected tokens of 1, 3 and 5 nodes: 1.9, 2.5, 2.52 and 1.1, 1.2, 1.24."""
    scores = jnp.log(jnp.array([[0.01, 0.2, 0.9, 0.4, 0.01], [0.1, 0.05, 0.05, 0.02, 0.02]]))
    both, sizes = jnp.array([True, True]), (1, 3, 5)

    def chosen(costs: list[float], active=both, gave_up=~both) -> int:
        milliseconds = jnp.array(costs, jnp.float32)
        return int(draft_length.choose_nodes(scores, active, gave_up, milliseconds, sizes))

    assert chosen([10, 10, 10]) == 2
    assert chosen([10, 11.9, 12.2]) == 1  # 0.3, 0.311, 0.308 tokens a millisecond
    assert chosen([10, 12.5, 15]) == 0
    assert chosen([10, 11.9, 12.2], jnp.array([False, True])) == 0
    # Who gave up has one token in any case: 2.1, 2.2 and 2.24 of both.
    assert chosen([10, 11.9, 12.2], both, jnp.array([True, False])) == 0


def random_tree(rng: np.random.Generator, nodes: int) -> DraftTree:
    parents = np.array([[rng.integers(0, j + 1) for j in range(nodes)] for _ in range(40)])
    tokens = jnp.asarray(rng.integers(0, 3, (40, nodes)))
    return DraftTree(tokens, jnp.asarray(parents), jnp.zeros((40, nodes)))


@pytest.mark.parametrize("nodes", [1, 2, 7, 13])
def test_the_branch_that_the_target_takes_stands(nodes: int) -> None:
    rng = np.random.default_rng(nodes)
    tree = random_tree(rng, nodes)
    choices = rng.integers(0, 3, (40, nodes + 1))
    verified, rows = verify_tree(tree, jnp.asarray(choices))
    sees = np.asarray(tree.sees)
    lengths = set()
    for b in range(40):
        parents = [-1, *tree.parents[b].tolist()]
        ancestors = []
        for row in range(nodes + 1):
            line = [row]
            while parents[line[0]] >= 0:
                line.insert(0, parents[line[0]])
            ancestors.append(line)
            assert np.flatnonzero(sees[b, row]).tolist() == sorted(line)
        stands = [
            line
            for line in ancestors
            if all(tree.tokens[b, r - 1] == choices[b, parents[r]] for r in line[1:])
        ]
        longest = max(map(len, stands))
        count = int(verified.count[b])
        assert count == longest
        assert rows[b, :count].tolist() in stands
        assert verified.tokens[b, :count].tolist() == [choices[b, r] for r in rows[b, :count]]
        lengths.add(count)
    assert len(lengths) > 1


def test_alternatives_are_accepted_where_a_chain_is_refused() -> None:
    """The same drafter, as many drafts: fewer steps."""
    models = tiny.make(draft_vocab_size=16, head_noise=0.15)
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, tiny.VOCAB - 1, 9).tolist() for _ in range(8)]
    params = [replace(tiny.PARAMS[2], seed=row) for row in range(8)]
    batch = tiny.make_batch(ids, params, 16, 40)
    chain, tree = (
        tiny.run(models, models.speculator(method, 7), batch)
        for method in ("p-eagle", "p-eagle+tree")
    )
    assert chain.rows() == tree.rows()
    assert tree.num_drafts.sum() < 0.95 * chain.num_drafts.sum()


def test_the_rejection_rule_needs_samples() -> None:
    models = tiny.make()
    drafter = models.drafters["p-eagle"]
    pair = Pair(models.target, drafter, models.params("p-eagle"), None, "float32")
    with pytest.raises(InputError, match="'rejection' with 'p-eagle\\+tree', expected 'coupled'"):
        make_speculator(pair, "p-eagle+tree", 7, verify="rejection")

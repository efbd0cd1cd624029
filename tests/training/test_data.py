"""Packed batches: nothing lost, nothing twice, nothing across rows; shards; resuming exactly."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle_jax.errors import InputError
from peagle_jax.training.answers import ANSWERS
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.data import DataConfig, TrainingData
from peagle_jax.training.documents import open_answers
from tests.training.folders import TOKENIZER, VOCAB, numbered, random_sizes, write_folder

LENGTH = 32
CONFIG = DataConfig(length=LENGTH, batch_size=4, num_threads=0)

Document = tuple[tuple[int, ...], tuple[int, ...]]


def open_data(*folders: Path, config: DataConfig = CONFIG, **changes: Any) -> TrainingData:
    config = dataclasses.replace(config, **changes)
    return TrainingData(folders, config, tokenizer_sha256=TOKENIZER, vocab_size=VOCAB)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "d", numbered(random_sizes(41, LENGTH)))


def unpack(batch: PackedBatch) -> list[Document]:
    """The documents of a batch, each as (prompt ids, answer ids); checks how they are packed."""
    documents = []
    for tokens, numbers, positions, answer in zip(
        *map(np.asarray, (batch.tokens, batch.documents, batch.positions, batch.answer)),
        strict=True,
    ):
        count = numbers.max()
        used = int(np.sum(numbers > 0))
        # Documents 1, 2, .. one after the other, then padding, which is all zeros.
        assert np.all(numbers[:used] > 0)
        assert sorted(set(numbers[:used].tolist())) == list(range(1, count + 1))
        assert np.all(np.diff(numbers[:used]) >= 0)
        for rest in (tokens, numbers, positions, answer):
            assert not rest[used:].any()
        for number in range(1, count + 1):
            inside = numbers == number
            np.testing.assert_array_equal(positions[inside], np.arange(inside.sum()))
            assert np.all(np.diff(answer[inside].astype(int)) >= 0)  # the prompt, then the answer
            documents.append(
                (tuple(tokens[inside & ~answer].tolist()), tuple(tokens[inside & answer].tolist()))
            )
    return documents


def contents(batches: Iterable[PackedBatch]) -> list[Document]:
    return [document for batch in batches for document in unpack(batch)]


def as_documents(pairs: Iterable[tuple[Iterable[int], Iterable[int]]]) -> list[Document]:
    return [(tuple(prompt), tuple(answer)) for prompt, answer in pairs]


def equal(left: PackedBatch, right: PackedBatch) -> bool:
    names = ("tokens", "documents", "positions", "answer")
    return all(np.array_equal(getattr(left, name), getattr(right, name)) for name in names)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=30),
    batch_size=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    shuffle=st.booleans(),
)
def test_every_epoch_has_every_token_once(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[int, int]],
    batch_size: int,
    seed: int,
    shuffle: bool,
) -> None:
    documents = numbered(sizes)
    folder = write_folder(tmp_path_factory.mktemp("d"), documents)
    data = open_data(
        folder, length=24, batch_size=batch_size, seed=seed, shuffle=shuffle, num_threads=0
    )
    batches = list(data.batches(num_epochs=3))
    assert len(batches) == 3 * data.batches_per_epoch
    for epoch in range(3):
        one = batches[epoch * data.batches_per_epoch :][: data.batches_per_epoch]
        assert sorted(contents(one)) == sorted(as_documents(documents))
    for batch in batches:
        assert np.shape(batch.tokens) == (batch_size, 24)
        dtypes = [np.asarray(one).dtype for one in (batch.tokens, batch.documents, batch.positions)]
        assert dtypes == [np.int32] * 3
        assert np.asarray(batch.answer).dtype == np.bool_
    tokens = sum(map(sum, sizes))
    assert data.counts.tokens == tokens
    assert data.counts.answer_tokens == sum(answer for _, answer in sizes)
    assert data.fill == tokens / (data.num_rows * 24)


def test_order_follows_seed_and_epoch(folder: Path) -> None:
    def rows(seed: int, shuffle: bool = True) -> list[list[Document]]:
        data = open_data(folder, seed=seed, batch_size=1, shuffle=shuffle)
        batches = list(data.batches(num_epochs=2))
        half = len(batches) // 2
        return [contents(batches[:half]), contents(batches[half:])]

    first, second = rows(0)
    assert first != second
    assert [first, second] == rows(0)
    assert first not in rows(1)
    first, second = rows(0, shuffle=False)
    assert first == second


def test_several_folders_are_one(tmp_path: Path) -> None:
    parts = [numbered(random_sizes(9, LENGTH, seed=i), start=1 + 1000 * i) for i in range(3)]
    folders = [write_folder(tmp_path / str(i), part) for i, part in enumerate(parts)]
    data = open_data(*folders)
    expected = as_documents(document for part in parts for document in part)
    assert sorted(contents(data.batches(num_epochs=1))) == sorted(expected)
    assert [len(survey.answer_lengths) for survey in data.surveys] == [9, 9, 9]
    assert data.counts.documents == 27


@pytest.mark.parametrize("shards", [1, 2, 3, 6])
def test_shards_are_disjoint_and_complete(folder: Path, shards: int) -> None:
    data = open_data(folder, batch_size=6)
    whole = list(data.batches(num_epochs=2))
    parts = [
        list(data.batches(num_epochs=2, shard_index=i, shard_count=shards)) for i in range(shards)
    ]
    assert {len(part) for part in parts} == {len(whole)}
    for place, batch in enumerate(whole):
        found = [part[place] for part in parts]
        assert {np.shape(one.tokens) for one in found} == {(6 // shards, LENGTH)}
        # Over all shards a batch holds the same, however many there are.
        assert Counter(contents(found)) == Counter(unpack(batch))


def test_the_last_batch_is_filled_with_empty_rows(tmp_path: Path) -> None:
    data = open_data(write_folder(tmp_path, numbered([(10, 20)] * 5)), batch_size=4)
    assert (data.num_rows, data.batches_per_epoch) == (5, 2)
    batches = list(data.batches(num_epochs=2))
    used = [np.asarray(batch.documents).any(axis=1).tolist() for batch in batches]
    assert used == [[True] * 4, [True] + [False] * 3] * 2


@pytest.mark.parametrize(("threads", "ahead"), [(0, 0), (2, 4)])
def test_resuming_gives_the_batches_that_followed(folder: Path, threads: int, ahead: int) -> None:
    config = dataclasses.replace(CONFIG, batch_size=3, num_threads=threads, prefetch=ahead)
    data = open_data(folder, config=config)
    total = 3 * data.batches_per_epoch
    expected = list(data.batches(num_epochs=3))
    assert len(expected) == total
    for done in (0, 1, data.batches_per_epoch, total - 2, total):
        first = data.batches(num_epochs=3)
        for place in range(done):
            assert equal(next(first), expected[place])
        saved = json.dumps(first.get_state())
        assert json.dumps(first.get_state()) == saved  # taking it changes nothing
        first.close()

        again = open_data(folder, config=config).batches(num_epochs=3)
        again.set_state(json.loads(saved))
        assert (again.num_done, again.epoch) == (done, done // data.batches_per_epoch)
        rest = list(again)
        assert len(rest) == total - done
        assert all(map(equal, rest, expected[done:]))


def test_an_iterator_goes_back_while_it_reads_ahead(folder: Path) -> None:
    batches = open_data(folder, num_threads=2).batches()
    state = batches.get_state()
    first = [next(batches) for _ in range(15)]
    batches.set_state(state)
    assert all(equal(next(batches), one) for one in first)
    batches.close()


def test_resuming_on_another_number_of_shards(folder: Path) -> None:
    data = open_data(folder, batch_size=4)
    whole = list(data.batches(num_epochs=3))
    two = [data.batches(num_epochs=3, shard_index=i, shard_count=2) for i in range(2)]
    for shard in two:
        for _ in range(7):
            next(shard)
    states = [shard.get_state() for shard in two]
    assert states[0] == states[1]
    one = data.batches(num_epochs=3)
    one.set_state(states[1])
    assert all(map(equal, one, whole[7:]))


def test_batches_without_end(folder: Path) -> None:
    data = open_data(folder)
    batches = data.batches()
    seen = [next(batches) for _ in range(4 * data.batches_per_epoch)]
    assert batches.epoch == 4
    counts = Counter(contents(seen))
    assert set(counts.values()) == {4}


class TestResumingRefuses:
    @staticmethod
    def state(folder: Path, **changes: Any) -> dict[str, Any]:
        batches = open_data(folder, **changes).batches()
        next(batches)
        state: dict[str, Any] = json.loads(json.dumps(batches.get_state()))
        return state

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"length": 40}, "length: found 32 saved, expected 40 as now"),
            ({"batch_size": 8}, "batch_size: found 4 saved, expected 8 as now"),
            ({"seed": 7}, "seed: found 0 saved, expected 7"),
            ({"overlong": "skip"}, "overlong: found error saved, expected skip"),
            ({"shuffle": False}, "shuffle: found True saved, expected False"),
        ],
    )
    def test_other_settings(self, folder: Path, changes: dict[str, Any], message: str) -> None:
        state = self.state(folder)
        batches = open_data(folder, **changes).batches()
        before = batches.get_state()
        with pytest.raises(InputError, match=f"place in the data: {message}"):
            batches.set_state(state)
        assert batches.get_state() == before

    def test_other_answers(self, folder: Path) -> None:
        state = self.state(folder)
        write_folder(folder, [([1], [2])])
        with pytest.raises(InputError, match=r"answers: found \['[0-9a-f]{64}'\] saved"):
            open_data(folder).batches().set_state(state)

    def test_other_packing(self, folder: Path) -> None:
        state = self.state(folder)
        state["data"]["packing"] = "0" * 64
        with pytest.raises(InputError, match="packing: found 0000"):
            open_data(folder).batches().set_state(state)

    def test_fewer_epochs(self, folder: Path) -> None:
        data = open_data(folder)
        long = data.batches(num_epochs=2)
        list(long)
        with pytest.raises(InputError, match=r"batches: found \d+ saved, expected at most"):
            data.batches(num_epochs=1).set_state(long.get_state())

    @pytest.mark.parametrize("bad", [{}, {"batches": "1", "grain": {}, "data": {}}])
    def test_what_is_no_state(self, folder: Path, bad: dict[str, Any]) -> None:
        with pytest.raises(InputError, match=r"found .*, expected one that was saved"):
            open_data(folder).batches().set_state(bad)


class TestOverlongAndEmpty:
    # 12, 40 and 33 tokens (the second all prompt within the limit of 32), an empty answer.
    SIZES = ((5, 7), (35, 5), (20, 13), (4, 0), (16, 16))

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return write_folder(tmp_path / "d", numbered(self.SIZES))

    def test_refused_by_default(self, folder: Path) -> None:
        with pytest.raises(InputError) as info:
            open_data(folder, empty="skip")
        path = folder / ANSWERS
        assert str(info.value) == f"{path}:2: id '1': found 40 tokens, expected at most 32"
        with pytest.raises(InputError) as info:
            open_data(folder, overlong="skip")
        assert str(info.value) == (
            f"{path}:4: id '3': found an empty answer, expected tokens to learn from"
        )

    def test_skipped(self, folder: Path) -> None:
        data = open_data(folder, overlong="skip", empty="skip")
        documents = as_documents(numbered(self.SIZES))
        found = sorted(contents(data.batches(num_epochs=1)))
        assert found == sorted([documents[0], documents[4]])
        assert dataclasses.asdict(data.counts) == {
            "documents": 2,
            "truncated": 0,
            "skipped_empty": 1,
            "skipped_overlong": 2,
            "tokens": 44,
            "answer_tokens": 23,
        }

    def test_truncated(self, folder: Path) -> None:
        data = open_data(folder, overlong="truncate", empty="skip")
        documents = as_documents(numbered(self.SIZES))
        cut = (documents[2][0], documents[2][1][:12])
        found = sorted(contents(data.batches(num_epochs=1)))
        assert found == sorted([documents[0], cut, documents[4]])
        assert dataclasses.asdict(data.counts) == {
            "documents": 3,
            "truncated": 1,
            "skipped_empty": 1,
            "skipped_overlong": 1,  # of its answer nothing would be left
            "tokens": 76,
            "answer_tokens": 35,
        }

    def test_nothing_left(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path, numbered([(4, 0), (30, 30)]))
        with pytest.raises(InputError, match=r"found no document .* 1 empty, 1 of more than 32"):
            open_data(folder, overlong="skip", empty="skip")
        with pytest.raises(InputError, match="found no document"):
            open_data(write_folder(tmp_path / "none", []))


class TestBadInput:
    def test_another_tokenizer_or_vocabulary(self, folder: Path) -> None:
        with pytest.raises(
            InputError, match=r"meta\.json: tokenizer_sha256: found abab.*model's c"
        ):
            open_answers([folder], tokenizer_sha256="cd" * 32, vocab_size=VOCAB)
        with pytest.raises(InputError, match=r"meta\.json: vocab_size: found 4096, .* 64"):
            open_answers([folder], tokenizer_sha256=TOKENIZER, vocab_size=64)

    def test_folders(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="found no folder"):
            open_data()
        with pytest.raises(InputError, match="found twice"):
            open_data(folder, tmp_path / "." / "d")
        with pytest.raises(InputError, match=r"meta\.json: found none"):
            open_data(folder, tmp_path / "missing")

    def test_a_bad_line_is_found_before_the_first_batch(self, folder: Path) -> None:
        with (folder / ANSWERS).open("a") as file:
            file.write('{"id": "x"}\n')
        with pytest.raises(InputError, match=r"answers\.jsonl:42: prompt_ids: found none"):
            open_data(folder)

    @pytest.mark.parametrize("threads", [0, 2])
    def test_answers_that_change_while_training(self, folder: Path, threads: int) -> None:
        data = open_data(folder, num_threads=threads)
        path = folder / ANSWERS
        path.write_bytes(path.read_bytes().replace(b'"answer_ids": [', b'"answer_ids": [9,'))
        with pytest.raises(InputError, match=r"answers\.jsonl:\d+: found"):
            list(data.batches(num_epochs=1))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"length": 0}, "length: found 0, expected 1 or more"),
            ({"batch_size": 0}, "batch_size: found 0"),
            ({"seed": -1}, "seed: found -1"),
            ({"num_threads": -1}, "num_threads: found -1"),
        ],
    )
    def test_settings(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            dataclasses.replace(CONFIG, **changes)

    def test_rules(self) -> None:
        """Checked again, past the type checks that only tests have."""
        for name in ("overlong", "empty"):
            config = dataclasses.replace(CONFIG)
            object.__setattr__(config, name, "drop")
            with pytest.raises(InputError, match=f"{name}: found 'drop', expected one of error,"):
                config.__post_init__()

    def test_shards(self, folder: Path) -> None:
        data = open_data(folder)
        with pytest.raises(InputError, match="batch_size: found 4, expected a multiple of the 3"):
            data.batches(shard_count=3)
        for index, count in ((2, 2), (-1, 1), (0, 0)):
            with pytest.raises(InputError, match=f"shard_index: found {index}"):
                data.batches(shard_index=index, shard_count=count)
        with pytest.raises(InputError, match="num_epochs: found 0"):
            data.batches(num_epochs=0)


def test_only_this_module_needs_grain() -> None:
    code = (
        "import sys; sys.modules['grain'] = None\n"
        "import peagle_jax.training.documents, peagle_jax.training.vocabulary\n"
        "from peagle_jax.errors import InputError\n"
        "try:\n    import peagle_jax.training.data\n"
        "except InputError as error:\n    print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("grain: found it not installed, expected it for training")

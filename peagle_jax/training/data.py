"""Training batches from folders of distilled answers: packed, shuffled, sharded, resumable.

What every row holds is planned once, from the lengths of all documents, before the first batch.
So bad documents are found before anything is compiled, an epoch has the same number of batches
on every host, and a place in the data is one number. Rows are read and put together when their
batch is due, by a Grain pipeline: source of rows -> shuffle, differently every epoch -> empty
rows up to whole batches -> the rows of this shard -> batches -> epochs -> prefetch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from peagle_jax.errors import InputError
from peagle_jax.training.batch import PackedBatch
from peagle_jax.training.documents import DocumentCounts, Documents, Empty, Overlong, open_answers
from peagle_jax.training.packing import PackingPlan, plan_packing
from peagle_jax.training.survey import Survey

try:
    import grain
except ImportError:
    raise InputError(
        "grain: found it not installed, expected it for training: pip install 'peagle-jax[train]'"
    ) from None

Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """How documents become batches.

    length: tokens of a row.
    batch_size: rows of a batch, over all shards together.
    seed: of the packing and of the order of rows; 0 to 2**32 - 1.
    overlong, empty: what is done with documents of more than `length` tokens and with those
        whose answer has none, see `Documents`.
    shuffle: rows in another order every epoch; otherwise in the packing's own.
    num_threads: that read batches ahead; 0 reads a batch when it is asked for.
    prefetch: batches read ahead.
    """

    length: int
    batch_size: int
    seed: int = 0
    overlong: Overlong = "error"
    empty: Empty = "error"
    shuffle: bool = True
    num_threads: int = 2
    prefetch: int = 4

    def __post_init__(self) -> None:
        for name, least in (("length", 1), ("batch_size", 1), ("num_threads", 0), ("prefetch", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name}: found {getattr(self, name)}, expected {least} or more")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed: found {self.seed}, expected 0 to 2**32 - 1")
        for name, choices in (("overlong", get_args(Overlong)), ("empty", get_args(Empty))):
            if getattr(self, name) not in choices:
                raise InputError(
                    f"{name}: found {getattr(self, name)!r}, expected one of {', '.join(choices)}"
                )


class TrainingData:
    """Documents of one or more folders of answers, planned into rows.

    Attributes:
        config: as given.
        surveys: one a folder, for the draft vocabulary and the mask token.
        counts: what became of the documents.
        num_rows: rows that hold all documents once.
    """

    config: DataConfig
    surveys: list[Survey]
    counts: DocumentCounts
    num_rows: int

    def __init__(
        self,
        folders: Sequence[Path],
        config: DataConfig,
        *,
        tokenizer_sha256: str,
        vocab_size: int,
    ) -> None:
        """Opens the folders and plans the rows; reads all answers where no survey is kept.

        `tokenizer_sha256` (of answers.py) and `vocab_size` are the model's: answers that
        were tokenised otherwise are refused. Raises InputError naming the file and the line,
        id or key of whatever is wrong with a folder, a line or a document.
        """
        files = open_answers(folders, tokenizer_sha256=tokenizer_sha256, vocab_size=vocab_size)
        self.config = config
        self._documents = Documents(files, config.length, config.overlong, config.empty)
        self.surveys = self._documents.surveys
        self.counts = self._documents.counts
        packing_seed, self._row_seed = np.random.SeedSequence(config.seed).generate_state(2)
        self._plan = plan_packing(self._documents.lengths, config.length, int(packing_seed))
        self.num_rows = self._plan.num_rows

    @property
    def batches_per_epoch(self) -> int:
        """Batches in which every document occurs exactly once."""
        return -(-self.num_rows // self.config.batch_size)

    @property
    def fill(self) -> float:
        """The share of the rows' tokens that is not padding."""
        return self.counts.tokens / (self.num_rows * self.config.length)

    def batches(
        self, *, num_epochs: int | None = None, shard_index: int = 0, shard_count: int = 1
    ) -> BatchIterator:
        """Batches of one shard, of `num_epochs` epochs or without end.

        Every shard has `batch_size / shard_count` rows of every batch. So all have equally
        many batches, and what a batch holds over all shards does not depend on their number.
        The last batch of an epoch is filled with empty rows (all padding): no document is
        dropped, none occurs twice. Raises InputError where the rows cannot be shared.
        """
        size, remainder = divmod(self.config.batch_size, max(1, shard_count))
        if not 0 <= shard_index < shard_count:
            raise InputError(f"shard_index: found {shard_index} of {shard_count} shards")
        if remainder:
            raise InputError(
                f"batch_size: found {self.config.batch_size}, expected a multiple of the "
                f"{shard_count} shards"
            )
        if num_epochs is not None and num_epochs < 1:
            raise InputError(f"num_epochs: found {num_epochs}, expected 1 or more")
        rows = _Rows(self._documents, self._plan, self.config.length)
        padded = self._in_order(rows, _empty_row(self.config.length))
        own = padded.slice(slice(shard_index, None, shard_count))
        return BatchIterator(own.batch(size, batch_fn=_stack).repeat(num_epochs), self)

    def documents_in(self, batch: int) -> list[str]:
        """File and line of every document in a batch, all shards together.

        Batches count from 0, over all epochs: it is `BatchIterator.num_done` before that one.
        """
        rows = self._in_order(range(self.num_rows), None)
        places = range(batch * self.config.batch_size, (batch + 1) * self.config.batch_size)
        return [
            self._documents.where(int(document))
            for row in (rows[place] for place in places)
            if row is not None
            for document in self._plan.row(row)
        ]

    def _in_order(self, rows: Any, padding: Any) -> grain.MapDataset:
        """What stands for each row, in the order of training, and `padding` up to whole batches."""
        ordered = grain.MapDataset.source(rows)
        if self.config.shuffle:
            ordered = ordered.shuffle(seed=int(self._row_seed))
        whole = self.batches_per_epoch * self.config.batch_size
        return _PaddedEpochs(ordered, whole, padding)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """All that decides what the batches hold, as JSON: answers, settings, the packing."""
        plan = hashlib.sha256(self._plan.documents.tobytes() + self._plan.row_starts.tobytes())
        settings = ("length", "batch_size", "seed", "overlong", "empty", "shuffle")
        return {
            "answers": [survey.sha256 for survey in self.surveys],
            **{name: getattr(self.config, name) for name in settings},
            "packing": plan.hexdigest(),
        }


class BatchIterator(Iterator[PackedBatch]):
    """Batches of NumPy arrays `[rows, length]`, read ahead in threads, resumable.

    Attributes:
        num_done: batches handed out, those before a restored state included.
    """

    num_done: int

    def __init__(self, batches: grain.MapDataset, data: TrainingData) -> None:
        """`batches`: of one shard, all epochs; `data`: what they are of."""
        threads = min(data.config.num_threads, data.config.prefetch)
        options = grain.ReadOptions(threads, data.config.prefetch)
        self._iterator = iter(batches.to_iter_dataset(options))
        self._total = len(batches)
        self._data = data
        self.num_done = 0

    def __next__(self) -> PackedBatch:
        batch: PackedBatch = next(self._iterator)
        self.num_done += 1
        return batch

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the next batch."""
        return self.num_done // self._data.batches_per_epoch

    def get_state(self) -> dict[str, Any]:
        """The place in the data, as JSON. Batches read ahead but not handed out are not passed.

        It is the same on every shard, and holds for any number of shards."""
        return {
            "batches": self.num_done,
            "grain": self._iterator.get_state(),
            "data": self._data.fingerprint,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a place: the next batch is the one that followed when the state was taken.

        Raises InputError where that was with other data or settings, naming the first that
        differs: the batches to follow would not be those of the first run.
        """
        found = {name: state.get(name) for name in ("batches", "grain", "data")}
        done, inner, data = found.values()
        if type(done) is not int or not isinstance(inner, dict) or not isinstance(data, dict):
            raise InputError(f"place in the data: found {found}, expected one that was saved")
        for key, now in self._data.fingerprint.items():
            if data.get(key) != now:
                raise InputError(
                    f"place in the data: {key}: found {data.get(key)} saved, expected {now} as now"
                )
        if not 0 <= done <= self._total:
            raise InputError(
                f"place in the data: batches: found {done} saved, expected at most the "
                f"{self._total} there are now"
            )
        self._iterator.set_state(inner)
        self.num_done = done

    def close(self) -> None:
        """Stops reading ahead; there are no batches after it."""
        self._iterator.close()


class _Rows:
    """Rows of the packing, put together when asked for."""

    def __init__(self, documents: Documents, plan: PackingPlan, length: int) -> None:
        self._documents = documents
        self._plan = plan
        self._length = length

    def __len__(self) -> int:
        return self._plan.num_rows

    def __getitem__(self, index: int) -> Row:
        row = _empty_row(self._length)
        start = 0
        for number, document in enumerate(self._plan.row(index), start=1):
            tokens, answer = self._documents.read(int(document))
            place = slice(start, start + len(tokens))
            row["tokens"][place] = tokens
            row["documents"][place] = number
            row["positions"][place] = np.arange(len(tokens))
            row["answer"][place] = answer
            start = place.stop
        return row


class _PaddedEpochs(grain.MapDataset):
    """Every epoch of the parent, followed by one and the same element up to `length`."""

    def __init__(self, parent: grain.MapDataset, length: int, padding: Any) -> None:
        super().__init__(parent)
        self._length = length
        self._padding = padding

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, place = divmod(index, self._length)
        parent = self.parents[0]
        return parent[epoch * len(parent) + place] if place < len(parent) else self._padding


def _empty_row(length: int) -> Row:
    names = {"tokens": np.int32, "documents": np.int32, "positions": np.int32, "answer": np.bool_}
    return {name: np.zeros(length, dtype) for name, dtype in names.items()}


def _stack(rows: Sequence[Row]) -> PackedBatch:
    arrays: dict[str, Any] = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return PackedBatch(**arrays)

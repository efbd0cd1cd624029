"""An engine without a device: its caches are lists of tokens, its target a checksum.

The target's next token is a function of the whole context, which is read from pages; so a page
that was shared, lost or overwritten changes what comes out. Calls are only queued, and run when
results are fetched, as on a device that is far behind.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from peagle_jax.config import SamplingParams
from peagle_jax.serving.engine_protocol import (
    EngineShape,
    Insertion,
    PrefillChunk,
    StepResults,
)
from peagle_jax.serving.pages import NULL_PAGE
from peagle_jax.serving.sequence import Request

VOCAB = 24
EOS = 0
GARBAGE = -7


def target(context: Sequence[int], seed: int) -> int:
    """The target's token after a context."""
    return zlib.crc32(np.asarray(context, np.int32).tobytes(), seed) % VOCAB


def accepted_drafts(length: int, seed: int, num_drafts: int) -> int:
    """How many drafts stand in the step whose newest token is the `length`-th: often all."""
    return min(zlib.crc32(bytes([length % 251]), seed + 1) % (2 * num_drafts + 1), num_drafts)


def answer(request: Request, context: int) -> tuple[tuple[int, ...], str]:
    """What a request must yield, and its finish reason."""
    tokens = list(request.token_ids)
    limit = min(request.params.max_new_tokens, context - len(tokens))
    while len(tokens) - len(request.token_ids) < limit:
        tokens.append(target(tokens, request.seed))
        if tokens[-1] == EOS and not request.params.ignore_eos:
            return tuple(tokens[len(request.token_ids) :]), "stop"
    return tuple(tokens[len(request.token_ids) :]), "length"


@dataclasses.dataclass
class Slot:
    """One slot of the device. `length` counts tokens, the newest not in the cache yet."""

    rows_written: int = 0
    length: int = 0
    last: int = 0
    limit: int = 0
    seed: int = 0
    ignore_eos: bool = False
    decoding: bool = False
    drafts: bool = False
    steps: int = 0
    finished: bool = True
    fresh: list[int] = dataclasses.field(default_factory=list)
    hit_eos: bool = False


class FakeEngine:
    """Records the calls that were made, in `log`.

    patience: steps after which a sequence gives up drafting.
    """

    def __init__(self, shape: EngineShape, patience: int = 1 << 30) -> None:
        self.shape = shape
        self.worth_drafting = self.worth_trying = True
        self.patience = patience
        self.inserted: list[Insertion] = []
        self.log: list[tuple[Any, ...]] = []
        self._queue: collections.deque[tuple[int, Callable[[], None]]] = collections.deque()
        self._calls = 0
        self._results: dict[int, StepResults] = {}
        self._slots = [Slot() for _ in range(shape.num_slots)]
        sizes = (shape.num_groups, shape.num_pages, shape.page_size)
        self._target = np.full(sizes, GARBAGE)
        self._drafter = np.full(sizes, GARBAGE)

    # --- calls --------------------------------------------------------------------

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        self.log.append(("prefill", *((c.slot, c.start, len(c.tokens)) for c in chunks)))
        assert len({chunk.slot for chunk in chunks}) == len(chunks) > 0

        def run() -> None:
            for chunk in chunks:
                self._prefill(chunk)

        self._enqueue(run)

    def insert(self, insertions: Sequence[Insertion]) -> None:
        self.log.append(("insert", *(one.slot for one in insertions)))
        self.inserted += insertions

        def run() -> None:
            for one in insertions:
                self._insert(one)

        self._enqueue(run)

    def step(self, num_steps: int, tables: np.ndarray, *, drafts: bool = True) -> int:
        assert tables.shape == (self.shape.num_slots, self.shape.pages_a_slot)
        assert tables.dtype == np.int32
        call = self._calls
        self.log.append(("step", call) if drafts else ("plain step", call))

        def run() -> None:
            self._results[call] = self._step(num_steps, tables, drafts)

        return self._enqueue(run)

    def fetch(self, pending: int) -> StepResults:
        self.log.append(("fetch", pending))
        while self._queue and self._queue[0][0] <= pending:
            self._queue.popleft()[1]()
        return self._results.pop(pending)

    def free(self, slots: Sequence[int]) -> None:
        self.log.append(("free", *slots))

        def run() -> None:
            for slot in slots:
                self._slots[slot] = Slot()

        self._enqueue(run)

    def settle(self) -> None:
        """Runs what is queued."""
        while self._queue:
            self._queue.popleft()[1]()

    def _enqueue(self, run: Callable[[], None]) -> int:
        self._queue.append((self._calls, run))
        self._calls += 1
        return self._calls - 1

    # --- what the device does -------------------------------------------------------

    def _cell(self, slot: int, pages: np.ndarray, position: int) -> tuple[int, int, int]:
        page, row = divmod(position, self.shape.page_size)
        return slot // self.shape.slots_a_group, int(pages[page]), row

    def _own_cell(self, slot: int, pages: np.ndarray, position: int) -> tuple[int, int, int]:
        cell = self._cell(slot, pages, position)
        assert cell[1] != NULL_PAGE, f"slot {slot} has no page for position {position}"
        return cell

    def _context(self, slot: int, pages: np.ndarray, stop: int) -> list[int]:
        return [int(self._target[self._own_cell(slot, pages, at)]) for at in range(stop)]

    def _prefill(self, chunk: PrefillChunk) -> None:
        slot = self._slots[chunk.slot]
        assert not slot.decoding, "a chunk for a slot that decodes"
        assert chunk.start % self.shape.page_size == 0
        assert chunk.start == slot.rows_written, "chunks have a gap"
        for at, token in enumerate(chunk.tokens.tolist(), start=chunk.start):
            self._target[self._own_cell(chunk.slot, chunk.pages, at)] = token
        slot.rows_written += len(chunk.tokens)

    def _insert(self, one: Insertion) -> None:
        slot = self._slots[one.slot]
        assert not slot.decoding
        assert slot.rows_written == one.length
        assert one.max_new_tokens >= 1
        assert one.length + one.max_new_tokens <= self.shape.context
        first = target(self._context(one.slot, one.pages, one.length), one.seed)
        slot = Slot(
            length=one.length + 1,
            last=first,
            limit=one.max_new_tokens - 1,
            seed=one.seed,
            ignore_eos=one.params.ignore_eos,
            decoding=True,
            drafts=one.drafts,
            fresh=[first],
        )
        slot.hit_eos = first == EOS and not slot.ignore_eos
        slot.finished = slot.hit_eos or slot.limit == 0
        self._slots[one.slot] = slot

    def _step(self, num_steps: int, tables: np.ndarray, drafts: bool) -> StepResults:
        size = self.shape.num_slots
        k = self.shape.num_draft_tokens if drafts else 0
        assert drafts or not any(slot.drafts for slot in self._slots)
        out: list[list[int]] = [slot.fresh for slot in self._slots]
        num_drafts = np.zeros(size, np.int32)
        accepted = np.zeros((size, self.shape.num_draft_tokens), np.int32)
        for slot in self._slots:
            slot.fresh = []
        for _ in range(num_steps):
            for index, slot in enumerate(self._slots):
                self._draft(index, slot, tables[index], k)
            for index, slot in enumerate(self._slots):
                active = not slot.finished
                new, stood = self._verify(index, slot, tables[index], k)
                out[index] = out[index] + new
                num_drafts[index] += active and k > 0
                accepted[index, :stood] += 1
                slot.steps += active
                slot.drafts &= slot.steps < self.patience
        tokens = np.full((size, num_steps * (k + 1) + 1), GARBAGE, np.int32)
        for index, new in enumerate(out):
            tokens[index, : len(new)] = new
        return StepResults(
            tokens=tokens,
            counts=np.asarray([len(new) for new in out], np.int32),
            finished=np.asarray([s.decoding and s.finished for s in self._slots]),
            hit_eos=np.asarray([s.hit_eos for s in self._slots]),
            num_drafts=num_drafts,
            num_draft_tokens=k * num_drafts,
            accepted=accepted,
            gave_up=np.asarray([not slot.drafts for slot in self._slots]),
        )

    def _draft(self, index: int, slot: Slot, pages: np.ndarray, k: int) -> None:
        """Scratch rows n .. n+K-2 of the drafter's cache, and padding up to n+2K-2."""
        n = slot.length - 1
        cell = self._cell if slot.finished else self._own_cell
        for at in range(max(n, 0), max(n, 0) + max(0, 2 * k - 1)):
            self._drafter[cell(index, pages, at)] = index

    def _verify(self, index: int, slot: Slot, pages: np.ndarray, k: int) -> tuple[list[int], int]:
        """Confirmed tokens, and how many drafts stood."""
        n = slot.length - 1
        if slot.finished:  # it stands still, and writes rows all the same
            for at in range(max(n, 0), max(n, 0) + k + 1):
                self._target[self._cell(index, pages, at)] = GARBAGE
            return [], 0
        for at in range(n, n + k - 1):
            assert self._drafter[self._own_cell(index, pages, at)] == index, "scratch is shared"
        stood = accepted_drafts(slot.length, slot.seed, k) if slot.drafts else 0
        context = [*self._context(index, pages, n), slot.last]
        new: list[int] = []
        for _ in range(stood + 1):
            new.append(target([*context, *new], slot.seed))
        written = [slot.last, *new[:stood], *[GARBAGE] * (k - stood)]
        for at, token in enumerate(written, start=n):
            self._target[self._own_cell(index, pages, at)] = token
        slot.length += len(new)
        slot.last = new[-1]
        if EOS in new and not slot.ignore_eos:
            new = new[: new.index(EOS) + 1]
        new = new[: slot.limit]
        slot.limit -= len(new)
        slot.hit_eos = EOS in new and not slot.ignore_eos
        slot.finished = slot.hit_eos or slot.limit == 0
        return new, stood


def make_request(
    key: object, prompt: Sequence[int], max_new_tokens: int, *, seed: int = 0, ignore_eos=False
) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos)
    return Request(key, tuple(prompt), params, seed)

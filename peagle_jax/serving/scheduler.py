"""Which request does what next: continuous batching over slots and pages. No jax.

A visit asks the device for parts of prompts, for insertions and for several speculative steps,
and then fetches the results of the visit before: the device already has its next work while
Python looks at what it has done.

**Pages.** A request is admitted when the pages of its prompt and of its first steps are free.
Before every visit a sequence's pages are made to cover whatever its steps, those in
flight included, may write. Where too few are free, the newest sequence of the group is
preempted: its pages are taken, and it waits to be prefilled again, its answer so far as part
of the prompt. A request that fits alone is always served: the oldest sequence of a group is
preempted by no other, so it ends; then the next one is the oldest. What does not fit alone is
refused when it is submitted.

**Order.** Requests are admitted strictly in order of arrival; nothing overtakes one that
waits for pages. Decisions depend on the calls and on the engine's results alone, not on time:
several hosts that are given the same requests make the same decisions.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import time
from collections.abc import Callable, Hashable
from typing import Any

from peagle_jax.errors import InputError
from peagle_jax.prospects import Prospects
from peagle_jax.serving.engine_protocol import Engine, Insertion, PrefillChunk
from peagle_jax.serving.sequence import Finished, FinishReason, Request, Tracked, Watch
from peagle_jax.serving.slots import Slots


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a visit is filled.

    steps_a_visit: speculative steps between two looks at results. More of them hide a slower
      host; a slot whose sequence has ended idles until its results are seen.
    prefill_tokens: prompt tokens a visit of each group, which bounds how long prefilling holds
      up the sequences that decode.
    """

    steps_a_visit: int = 4
    prefill_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("steps_a_visit", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: found {getattr(self, name)}, expected 1 or more")


@dataclasses.dataclass(frozen=True)
class Update:
    """New tokens of a request, and its end where it has come."""

    key: Hashable
    tokens: tuple[int, ...]
    finished: Finished | None = None


@dataclasses.dataclass
class Counters:
    """What a scheduler has done so far.

    prefill_tokens counts those computed again (recomputed_tokens) too. slot_steps are steps
    times slots with a sequence that decoded, idle_slot_steps steps times other slots.
    least_free_pages is the least over visits and groups.
    """

    visits: int = 0
    steps: int = 0
    slot_steps: int = 0
    idle_slot_steps: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    least_free_pages: int | None = None


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """Steps whose results were not fetched: (sequence, slot, most, least tokens)."""

    pending: Any
    occupants: list[tuple[Tracked, int, int, int]]


class Scheduler:
    """Drives an engine. Not safe for several threads.

    Attributes:
        counters: what was done so far.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is for the times in results only.

        Raises InputError where the prefill budget is less than a page.
        """
        self.counters = Counters()
        self._engine, self._shape = engine, engine.shape
        self._policy = policy or Policy()
        self._clock = clock
        if self._policy.prefill_tokens < self._shape.page_size:
            raise InputError(
                f"prefill_tokens: found {self._policy.prefill_tokens}, expected at least "
                f"{self._shape.page_size}, the size of a page"
            )
        self._slots = Slots(self._shape)
        self._prospects = Prospects(engine, engine.shape.num_slots)
        self._waiting: list[Tracked] = []  # in order of arrival
        self._live: dict[Hashable, Tracked] = {}
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._arrivals = 0

    # --- requests -----------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in a slot."""
        return len(self._live) - len(self._waiting)

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody holds, over all groups."""
        return sum(self._slots.free_pages)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self._live and not self._in_flight

    def check(self, request: Request) -> None:
        """Raises InputError for a request that can never be served."""
        self._checked(request, None)

    def submit(self, request: Request, watch: Watch | None = None) -> None:
        """Takes a request in. `watch` may end its answer early.

        Raises InputError as `check` does, or where a request with its key is being served.
        """
        if request.key in self._live:
            raise InputError(f"request {request.key!r}: found it twice, expected keys to differ")
        tracked = self._checked(request, watch)
        self._arrivals += 1
        self._live[request.key] = tracked
        self._waiting.append(tracked)

    def cancel(self, key: Hashable) -> Finished | None:
        """Ends a request with the tokens that are known; None where none is being served."""
        tracked = self._live.get(key)
        if tracked is None:
            return None
        if tracked.slot is None:
            self._waiting.remove(tracked)
        else:
            self._engine.free([self._slots.vacate(tracked)])
        return self._end(tracked, "cancelled")

    def _checked(self, request: Request, watch: Watch | None) -> Tracked:
        shape, where = self._shape, f"request {request.key!r}"
        tracked = Tracked(request, self._arrivals, shape, watch, self._clock())
        length = len(request.token_ids)
        if not length:
            raise InputError(f"{where}: found no tokens, expected at least one")
        if length >= shape.context:
            raise InputError(
                f"{where}: found {length} tokens, expected at most {shape.context - 1} "
                "(the context less one token of answer)"
            )
        needed = self._slots.pages_for(tracked.most_positions)
        if needed > shape.num_pages - 1:
            raise InputError(
                f"{where}: found {length} tokens and max_new_tokens {tracked.limit}, which need "
                f"{needed} pages of {shape.page_size}; expected at most {shape.num_pages - 1}, "
                "all that the cache has"
            )
        return tracked

    # --- a visit ------------------------------------------------------------------

    def visit(self) -> list[Update]:
        """Gives the device its next work and returns what the work before has brought."""
        updates: list[Update] = []
        self.counters.visits += 1
        preempted = self._reserve(updates)
        if not preempted:
            self._admit()
        prefilled = self._prefill()
        stepped = self._step()
        least = min(self._slots.free_pages)
        before = self.counters.least_free_pages
        self.counters.least_free_pages = least if before is None else min(before, least)
        if not (prefilled or stepped or preempted or self._in_flight) and self._live:
            raise RuntimeError("requests are waiting, and none of them can be served")
        # Steps that were just begun are left to run while the caller goes on.
        while len(self._in_flight) > stepped:
            self._collect(updates)
        return updates

    def _reserve(self, updates: list[Update]) -> bool:
        """Makes the pages of all that decode cover their next steps; whether any lost its own."""
        preempted = False
        while (short := self._grow()) is not None:
            if self._in_flight:
                # What is known of the steps in flight may end sequences, and frees what was
                # kept for tokens that were not accepted.
                while self._in_flight:
                    self._collect(updates)
                for tracked in self._slots.decoding():
                    positions = tracked.positions_for(self._policy.steps_a_visit)
                    self._slots.trim(tracked, positions)
                continue
            self._preempt(self._slots.newest_beside(short))
            preempted = True
        return preempted

    def _grow(self) -> Tracked | None:
        """Reserves pages, the oldest sequence first; the first one that finds none."""
        for tracked in self._slots.decoding():
            positions = tracked.positions_for(self._policy.steps_a_visit)
            if not tracked.surely_over and not self._slots.reserve(tracked, positions):
                return tracked
        return None

    def _preempt(self, tracked: Tracked) -> None:
        self._engine.free([self._slots.vacate(tracked)])
        tracked.preemptions += 1
        self.counters.preemptions += 1
        bisect.insort(self._waiting, tracked, key=lambda one: one.arrival)

    def _admit(self) -> None:
        """Gives slots and pages to those that wait, in order of arrival."""
        while self._waiting:
            tracked = self._waiting[0]
            if not self._slots.admit(tracked, tracked.positions_for(self._policy.steps_a_visit)):
                return
            del self._waiting[0]
            tracked.drafts, tracked.anew = self._prospects.of_next()
            if not tracked.preemptions:
                tracked.times.started = self._clock()

    def _prefill(self) -> bool:
        """Asks for parts of prompts, within the budget; whether there were any."""
        page_size = self._shape.page_size
        budgets = [self._policy.prefill_tokens] * self._shape.num_groups
        chunks: list[PrefillChunk] = []
        insertions: list[Insertion] = []
        for tracked in self._slots:
            if tracked.inserted:
                continue
            assert tracked.slot is not None
            group = tracked.slot // self._shape.slots_a_group
            start, length = tracked.prefilled, tracked.length
            size = min(length - start, budgets[group])
            if start + size < length:
                size -= size % page_size
            if not size:
                budgets[group] = 0  # nothing overtakes it
                continue
            pages, stop = self._slots.pages(tracked), start + size
            following = int(tracked.tokens(stop, stop + 1)[0]) if stop < length else None
            tokens, drafts = tracked.tokens(start, stop), tracked.drafts
            chunks.append(PrefillChunk(tracked.slot, start, tokens, following, pages, drafts))
            budgets[group] -= size
            tracked.prefilled = stop
            self.counters.prefill_tokens += size
            self.counters.recomputed_tokens += size if tracked.preemptions else 0
            if following is None:
                room = tracked.limit - len(tracked.generated)
                params, seed = tracked.request.params, tracked.request.seed
                insertions.append(
                    Insertion(tracked.slot, length, room, params, seed, pages, drafts, tracked.anew)
                )
                tracked.inserted = tracked.fresh = True
        if chunks:
            self._engine.prefill(chunks)
        if insertions:
            self._engine.insert(insertions)
        return bool(chunks)

    def _step(self) -> bool:
        """Asks for steps; whether any sequence needs them."""
        decoding = self._slots.decoding()
        if all(tracked.surely_over for tracked in decoding):
            return False
        num_steps = self._policy.steps_a_visit
        occupants: list[tuple[Tracked, int, int, int]] = []
        for tracked in decoding:
            assert tracked.slot is not None
            most, least = tracked.gain(num_steps), num_steps + tracked.fresh
            tracked.most_ahead += most
            tracked.least_ahead += least
            tracked.fresh = False
            occupants.append((tracked, tracked.slot, most, least))
        self.counters.steps += num_steps
        self.counters.slot_steps += num_steps * len(decoding)
        self.counters.idle_slot_steps += num_steps * (len(self._slots) - len(decoding))
        drafts = any(tracked.drafts for tracked in decoding)
        self._prospects.stepped(num_steps, drafts)
        pending = self._engine.step(num_steps, self._slots.step_tables(), drafts=drafts)
        self._in_flight.append(_InFlight(pending, occupants))
        return True

    def _collect(self, updates: list[Update]) -> None:
        """Waits for the oldest steps in flight and takes in what they brought."""
        oldest = self._in_flight.popleft()
        results = self._engine.fetch(oldest.pending)
        now = self._clock()
        freed = []
        for tracked, slot, most, least in oldest.occupants:
            tracked.most_ahead -= most
            tracked.least_ahead -= least
            if tracked.over:
                continue
            before = len(tracked.generated)
            new = tracked.take(results, slot)
            if new and not before:
                tracked.times.first_token = now
            stands = tracked.watch(new) if tracked.watch and new else None
            if stands is not None:
                del tracked.generated[stands:]
            reason: FinishReason | None = None
            if stands is not None or results.hit_eos[slot]:
                reason = "stop"
            elif results.finished[slot]:
                reason = "length"
            finished = None
            if reason is not None:
                freed.append(self._slots.vacate(tracked))
                finished = self._end(tracked, reason)
            tokens = tuple(tracked.generated[before:])
            if tokens or finished:
                updates.append(Update(tracked.request.key, tokens, finished))
        if freed:
            self._engine.free(freed)

    def _end(self, tracked: Tracked, reason: FinishReason) -> Finished:
        del self._live[tracked.request.key]
        return tracked.finish(reason, self._clock())

    def check_invariants(self) -> None:
        """Raises AssertionError where slots, pages and requests do not fit together."""
        self._slots.check()
        arrivals = [tracked.arrival for tracked in self._waiting]
        assert arrivals == sorted(arrivals), "the queue is out of order"
        waiting = {tracked.request.key for tracked in self._waiting}
        running = {tracked.request.key for tracked in self._slots}
        assert not waiting & running, "a request both waits and runs"
        assert waiting | running == self._live.keys(), "a request is lost"

"""The engine: slots over a paged cache on one device, or on the data groups of a mesh.

A few compiled programs of fixed shapes do everything. Calls are dispatched and return; the
results of steps are copied to the host while the device goes on, and `fetch` waits for them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from peagle_jax import step_costs
from peagle_jax.batching import fine_bucket, prompt_bucket
from peagle_jax.config import SamplingParams
from peagle_jax.decoding.draft_length import FIRST_RATE, HOPED_RATE, worth_drafting
from peagle_jax.decoding.generate import PREFILL_CHUNK
from peagle_jax.decoding.sampling import RequestArrays
from peagle_jax.decoding.speculate import Speculator
from peagle_jax.decoding.state import Params
from peagle_jax.errors import InputError
from peagle_jax.mesh_shape import ONE_DEVICE, MeshShape
from peagle_jax.models.paged_cache import bytes_a_position
from peagle_jax.runner import compiled
from peagle_jax.serving import device, programs
from peagle_jax.serving.device import ChunkArrays, InsertionArrays
from peagle_jax.serving.engine_protocol import (
    EngineShape,
    Insertion,
    PrefillChunk,
    StepResults,
)
from peagle_jax.serving.pages import NULL_PAGE
from peagle_jax.sharding import DATA, from_first, spans_processes


@dataclasses.dataclass(frozen=True)
class BackendSizes:
    """What suits a backend where a caller does not say.

    page_size: positions a page; TPU kernels need 128 for every head size.
    prefill_rows: parts of prompts are computed together up to so many rows.
    piece_rows: parts are cut into pieces of so many rows, of which any number are computed
        together, so that hardly a row is padding; None = each part as a whole, beside others of
        like length. On CPU the time of padding counts, elsewhere the number of programs.
    steps_a_visit: see `Policy`. On CPU a step takes longer than what the host does between two.
    """

    page_size: int
    prefill_rows: int
    piece_rows: int | None
    steps_a_visit: int

    @classmethod
    def here(cls) -> BackendSizes:
        """Of the default backend."""
        backend = jax.default_backend()
        if backend == "cpu":
            return cls(page_size=32, prefill_rows=PREFILL_CHUNK, piece_rows=16, steps_a_visit=1)
        page_size = 128 if backend == "tpu" else 32
        return cls(page_size, prefill_rows=PREFILL_CHUNK, piece_rows=None, steps_a_visit=4)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """What of a prompt is one row of a batch; `ends`: its chunk ends with it."""

    chunk: PrefillChunk
    ends: bool

    @classmethod
    def all_of(cls, chunk: PrefillChunk, rows: int) -> Iterator[_Piece]:
        """Pieces of so many rows, the last one perhaps of fewer."""
        count = len(chunk.tokens)
        for begin in range(0, count, rows):
            stop, ends = begin + rows, begin + rows >= count
            piece = dataclasses.replace(
                chunk,
                start=chunk.start + begin,
                tokens=chunk.tokens[begin:stop],
                following=chunk.following if ends else int(chunk.tokens[stop]),
            )
            yield cls(piece, ends)


class PagedEngine:
    """An `engine_protocol.Engine`.

    Attributes:
        shape: fixed sizes.
        worth_drafting, worth_trying: see the protocol.
        compile_seconds: time that compiling has taken.
        wait_seconds: time that `fetch` has waited for the device.
    """

    def __init__(
        self,
        speculator: Speculator,
        params: Params,
        shape: EngineShape,
        *,
        mesh: Mesh | None = None,
        sizes: BackendSizes | None = None,
        executables: dict[Any, Any] | None = None,
    ) -> None:
        """Args:
            mesh: of `sharding.make_inference_mesh`; the parameters lie on it as
                `decoding.placement` says, and the shape's groups are its `data`. None = the
                default device.
            sizes: how prefill is cut; None = as suits the backend.
            executables: where compiled programs are kept and looked for, such as
                `Pair.compiled`; engines of one shape can share them.

        Raises InputError where the target's context is shorter than the shape's.
        """
        if shape.context > speculator.target.max_positions:
            raise InputError(
                f"context: found {shape.context}, expected at most "
                f"{speculator.target.max_positions}, the target's"
            )
        groups = 1 if mesh is None else mesh.shape[DATA]
        if (shape.num_groups, shape.num_draft_tokens) != (groups, speculator.num_draft_tokens):
            raise ValueError(f"{shape} is for other engines than one of {speculator} on {mesh}")
        self.shape = shape
        self.worth_drafting = self.worth_trying = True
        self.compile_seconds = self.wait_seconds = 0.0
        self._speculator, self._params, self._mesh = speculator, params, mesh
        self._sizes = sizes or BackendSizes.here()
        self._executables = {} if executables is None else executables
        self._pools, self._slots = programs.init(speculator, shape, mesh)

    # --- the protocol -------------------------------------------------------------

    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Computes parts of prompts, of different slots."""
        groups, slots = range(self.shape.num_groups), self.shape.slots_a_group
        cut = self._sizes.piece_rows
        alike: dict[tuple[int, bool], list[list[_Piece]]] = {}
        for chunk in chunks:
            rows = cut or prompt_bucket(len(chunk.tokens))
            lists = alike.setdefault((rows, chunk.drafts), [[] for _ in groups])
            lists[chunk.slot // slots] += _Piece.all_of(chunk, rows)
        for (rows, drafts), lists in alike.items():
            most = max(1, self._sizes.prefill_rows // rows)
            while longest := max(map(len, lists)):
                if cut:
                    size = min(most, -(-fine_bucket(longest * rows) // rows))
                else:
                    # Two sizes of batches are compiled, the largest and one.
                    size = most if longest > most // 2 else 1
                self._prefill([of_group[:size] for of_group in lists], size, rows, drafts)
                lists = [of_group[size:] for of_group in lists]

    def insert(self, insertions: Sequence[Insertion]) -> None:
        """Draws the first token of prefilled sequences and lets them decode."""
        mask, length = self._column(bool), self._column(np.int32)
        drafts, anew = self._column(bool), self._column(bool)
        columns: dict[str, Any] = {
            "temperature": self._column(np.float32),
            "top_k": self._column(np.int32),
            "top_p": self._column(np.float32),
            "min_p": self._column(np.float32),
            "seed": self._column(np.uint32),
            "max_new_tokens": self._column(np.int32),
            "ignore_eos": self._column(bool),
        }
        for one in insertions:
            mask[one.slot], length[one.slot] = True, one.length
            drafts[one.slot], anew[one.slot] = one.drafts, one.anew
            values = {name: getattr(one.params, name) for name in columns} | {
                "top_k": min(one.params.top_k, self._speculator.target.vocab_size),
                "seed": one.seed,
                "max_new_tokens": one.max_new_tokens,
            }
            for name, column in columns.items():
                column[one.slot] = values[name]
        new = InsertionArrays(mask, length, drafts, anew, RequestArrays(**columns))
        (self._slots,) = self._run(
            ("insert",),
            device.insert,
            (self._params, self._slots, new),
            speculator=self._speculator,
        )

    def step(
        self, num_steps: int, tables: Int[np.ndarray, "slots pages"], *, drafts: bool = True
    ) -> jax.Array:
        """Speculative steps of all sequences that decode."""
        self._pools, self._slots, packed = self._run(
            ("step", num_steps, drafts),
            device.step,
            (self._params, self._pools, self._slots, tables),
            speculator=self._speculator,
            num_steps=num_steps,
            drafts=drafts,
        )
        packed.copy_to_host_async()
        return packed

    def fetch(self, pending: jax.Array) -> StepResults:
        """Waits for what a step has made."""
        begin = time.perf_counter()
        packed = np.asarray(pending)
        self.wait_seconds += time.perf_counter() - begin
        results, self.worth_drafting = device.unpack(packed, self.shape.num_draft_tokens)
        return results

    def free(self, slots: Sequence[int]) -> None:
        """These slots no longer have a sequence."""
        mask = self._column(bool)
        mask[list(slots)] = True
        (self._slots,) = self._run(("free",), device.free, (self._slots, mask))

    def measure_step_costs(
        self, num_steps: int, *, on_measuring: Callable[[], None] | None = None
    ) -> None:
        """Lets steps choose their draft length by what each costs here, measured or remembered;
        before the first sequence comes. Nothing where the length is fixed.

        num_steps: as many as calls of `step` will ask for, so that their program is timed.
        on_measuring: called where nothing is remembered.
        """
        if not self._speculator.lengths:
            return

        def measured() -> Float[np.ndarray, "lengths"]:
            if on_measuring is not None:
                on_measuring()
            # What is measured on is no request: nothing is to be learnt from its drafts.
            rates = jnp.copy(self._slots.rates)
            costs = step_costs.measure(
                self._speculator.lengths, lambda costs: self._seconds_a_step(costs, num_steps)
            )
            self._slots = dataclasses.replace(self._slots, rates=rates)
            return costs

        if self._mesh is not None and spans_processes(self._mesh):
            # One process may remember what another must measure; and clocks differ.
            costs = from_first(measured(), self._mesh)
        else:
            axes = None if self._mesh is None else dict(self._mesh.shape)
            subject = ("engine", self._speculator, self.shape.num_slots, num_steps, axes)
            costs = step_costs.remembered(subject, self._speculator.lengths, measured)
        self._set_step_costs(costs)

        def worth(rate: float) -> bool:
            rates = jnp.full((1, self.shape.num_draft_tokens), rate)
            lengths = self._speculator.lengths
            return bool(worth_drafting(rates, jnp.asarray(costs), lengths))

        self.worth_drafting, self.worth_trying = worth(FIRST_RATE), worth(HOPED_RATE)

    def _set_step_costs(self, costs: Float[np.ndarray, "lengths"]) -> None:
        # On the host, from where a program takes it to wherever it belongs.
        row: Any = np.asarray(costs, np.float32)
        self._slots = dataclasses.replace(self._slots, step_costs=row)

    def _seconds_a_step(self, costs: Float[np.ndarray, "lengths"], num_steps: int) -> float:
        """Of a sequence alone: steps compute all slots, whether they decode or not."""
        tables = np.full((self.shape.num_slots, self.shape.pages_a_slot), NULL_PAGE, np.int32)
        positions = 1 + num_steps * (self.shape.num_draft_tokens + 1) + self.shape.scratch_rows
        pages = min(-(-positions // self.shape.page_size), self.shape.num_pages - 1)
        tables[0, :pages] = np.arange(1, 1 + pages)
        greedy = SamplingParams(ignore_eos=True)
        room = self.shape.context - 1
        self.insert([Insertion(0, 1, room, greedy, 0, tables[0])])
        self._set_step_costs(costs)
        jax.block_until_ready(self._slots)
        begin = time.perf_counter()
        # Where nobody drafts steps are those of plain decoding.
        drafts = bool(np.argmin(costs))
        jax.block_until_ready(self.step(num_steps, tables, drafts=drafts))
        seconds = time.perf_counter() - begin
        self.free([0])
        return seconds / num_steps

    # --- calls of programs --------------------------------------------------------

    def _prefill(
        self, groups: Sequence[Sequence[_Piece]], size: int, rows: int, drafts: bool
    ) -> None:
        """At most `size` pieces of every group, of at most `rows` tokens."""
        slots, total = self.shape.slots_a_group, size * len(groups)
        placed = [
            (group * size + row, piece)
            for group, pieces in enumerate(groups)
            for row, piece in enumerate(pieces)
        ]
        # Padding may reach past the table that a slot has.
        width = self.shape.pages_a_slot - (-rows // self.shape.page_size)
        arrays: dict[str, Any] = {
            "slot": np.full(total, slots, np.int32),
            "tokens": np.zeros((total, rows), np.int32),
            "following": np.zeros((total, rows), np.int32),
            "start": np.zeros(total, np.int32),
            "counts": np.zeros(total, np.int32),
            "ends": np.zeros(total, bool),
            "tables": np.full((total, width), NULL_PAGE, np.int32),
        }
        for row, piece in placed:
            chunk, count = piece.chunk, len(piece.chunk.tokens)
            arrays["slot"][row], arrays["start"][row] = chunk.slot % slots, chunk.start
            arrays["counts"][row], arrays["ends"][row] = count, piece.ends
            arrays["tokens"][row, :count] = chunk.tokens
            arrays["following"][row, : count - 1] = chunk.tokens[1:]
            if chunk.following is not None:
                arrays["following"][row, count - 1] = chunk.following
            arrays["tables"][row, : len(chunk.pages)] = chunk.pages
        self._pools, self._slots = self._run(
            ("prefill", size, rows, drafts),
            device.prefill,
            (self._params, self._pools, self._slots, ChunkArrays(**arrays)),
            speculator=self._speculator,
            drafts=drafts,
        )

    def _run(
        self, key: tuple[Any, ...], function: Any, args: tuple[Any, ...], **static: Any
    ) -> Any:
        """Calls the program of `key`, which fixes all shapes, and compiles it if need be."""
        program, seconds = compiled(
            self._executables,
            (*key, self._speculator, self.shape, self._mesh),
            lambda: programs.lower(function, self._mesh, args, **static),
        )
        self.compile_seconds += seconds
        return program(*args)

    def _column(self, dtype: Any) -> Any:
        return np.zeros(self.shape.num_slots, dtype)


def make_shape(
    speculator: Speculator,
    *,
    num_slots: int,
    page_size: int,
    context: int,
    num_pages: int | None,
    cache_bytes: int,
    mesh: MeshShape = ONE_DEVICE,
) -> EngineShape:
    """An engine's sizes, checked.

    num_slots: over all data groups of the mesh.
    num_pages: pages of each group that hold tokens. None = as many as each device has room for
        in `cache_bytes`, and no more than a group's slots can use.

    Raises InputError for sizes that make no engine, or have no room for one whole context.
    """
    limit = speculator.target.max_positions
    for name, found, least in (
        ("slots", num_slots, 1),
        ("page size", page_size, 1),
        ("context", context, 2),
        ("pages", 1 if num_pages is None else num_pages, 1),
    ):
        if found < least:
            raise InputError(f"{name}: found {found}, expected {least} or more")
    if context > limit:
        raise InputError(f"context: found {context}, expected at most {limit}, the target's")
    if num_slots % mesh.data:
        raise InputError(
            f"slots: found {num_slots}, expected a multiple of {mesh.data}, the mesh's data groups"
        )
    draft = EngineShape(
        num_slots,
        2,
        page_size,
        context,
        speculator.num_draft_tokens,
        mesh.data,
        speculator.pending_rows,
    )
    whole = -(-(context + draft.scratch_rows) // page_size)
    a_page = page_bytes(speculator, page_size, mesh.model)
    if num_pages is None:
        num_pages = min(cache_bytes // a_page, draft.slots_a_group * draft.pages_a_slot)
        if num_pages < whole:
            raise InputError(
                f"cache memory: found {cache_bytes} bytes, expected at least {whole * a_page}, "
                f"which one sequence of the context of {context} tokens takes"
            )
    elif num_pages < whole:
        raise InputError(
            f"pages: found {num_pages}, expected at least {whole}, which one sequence of the "
            f"context of {context} tokens takes"
        )
    return dataclasses.replace(draft, num_pages=num_pages + 1)


def page_bytes(speculator: Speculator, page_size: int, split: int = 1) -> int:
    """Bytes that one page of both networks' caches takes on a device, of `split` that share the
    target's heads."""
    total = bytes_a_position(speculator.target.block, speculator.dtype) // split
    if speculator.drafter:
        total += bytes_a_position(speculator.drafter.block, speculator.dtype)
    return page_size * total

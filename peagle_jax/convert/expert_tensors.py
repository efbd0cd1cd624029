"""Experts' weights in the forms that checkpoints have, and the parameters they become.

A parameter holds one linear layer of all experts, `[experts, out, in]`, its biases
`[experts, out]`; its canonical name is the one that a single expert's tensor would have:
`model.layers.0.mlp.experts.gate_proj.weight`. Checkpoints have either

    separate     a tensor an expert, `..experts.3.gate_proj.weight` [out, in] (Qwen3-MoE); or
    interleaved  `..experts.gate_up_proj` [experts, in, 2 out], whose outputs are gate's and
                 up's by turns, and `..experts.down_proj` [experts, in, out]; biases in
                 `..gate_up_proj_bias` [experts, 2 out] and `..down_proj_bias` (gpt-oss)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import jax
import numpy as np

from peagle_jax.convert.base_reader import Reader
from peagle_jax.convert.lazy_tensor import LazyTensor, check_stored
from peagle_jax.convert.safetensors_file import Output

Form = Literal["separate", "interleaved"]

_NAME = re.compile(r"^(?P<stem>.*\.experts)\.(?P<module>\w+_proj)\.(?P<leaf>weight|bias)$")
_ROUTER = re.compile(r"\.mlp\.router\.")
_INTERLEAVED = re.compile(r"\.experts\.(gate_up|down)_proj(_bias)?$")
# Where a module's outputs are among its stored tensor's: every second one from here on.
_TURNS = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}


def form_of(names: Iterable[str]) -> Form:
    """The form of a checkpoint's experts, from its tensor names."""
    return "interleaved" if any(_INTERLEAVED.search(name) for name in names) else "separate"


def stored_names(name: str, count: int, form: Form) -> list[str]:
    """The tensors that a parameter of this canonical name is made of; `name` alone where it is
    not of experts."""
    match = _NAME.match(name)
    if match is None:
        return [name]
    stem, module, leaf = match["stem"], match["module"], match["leaf"]
    if form == "separate":
        return [f"{stem}.{expert}.{module}.{leaf}" for expert in range(count)]
    stored, _ = _TURNS.get(module, (module, 0))
    return [f"{stem}.{stored}{'_bias' if leaf == 'bias' else ''}"]


def lazy(
    reader: Reader, own_names: tuple[str, ...], name: str, leaf: jax.ShapeDtypeStruct, form: Form
) -> LazyTensor | None:
    """The parameter of a canonical name, from the reader's tensors; None where it is not of
    experts. Raises InputError on a tensor that does not fit."""
    match = _NAME.match(name)
    if match is None:
        return None
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    if form == "separate":
        for own in own_names:
            check_stored(reader, own, shape[1:], dtype)
        return SeparateExperts(reader, own_names[0], shape, dtype, own_names)
    (own,) = own_names
    turn = _TURNS[match["module"]][1] if match["module"] in _TURNS else None
    out = shape[1] * (1 if turn is None else 2)
    expected = (shape[0], *shape[2:], out)  # [experts, in, out], or of biases [experts, out]
    check_stored(reader, own, expected, dtype)
    return InterleavedExperts(reader, own, shape, dtype, turn)


@dataclasses.dataclass(frozen=True)
class SeparateExperts(LazyTensor):
    """`[experts, ...]` from a tensor an expert, in the order of `names`."""

    names: tuple[str, ...] = ()

    def rows(self, start: int, stop: int) -> np.ndarray:
        parts = []
        for name in self.names[start:stop]:
            part = self.reader.read(name).astype(self.dtype, copy=False)
            self.reader.check_finite(name, part)
            parts.append(part)
        return parts[0][None] if len(parts) == 1 else np.stack(parts)


@dataclasses.dataclass(frozen=True)
class InterleavedExperts(LazyTensor):
    """`[experts, out, in]` or `[experts, out]` from `[experts, in, out]` or `[experts, out]`,
    of whose outputs every second one is taken, from `turn` on; None = all."""

    turn: int | None = None

    def rows(self, start: int, stop: int) -> np.ndarray:
        last = slice(None) if self.turn is None else slice(self.turn, None, 2)
        taken = self.reader.rows_at(self.name, start, stop, last)
        rows = np.ascontiguousarray(np.moveaxis(taken, -1, 1), dtype=self.dtype)
        self.reader.check_finite(self.name, rows)
        return rows


def is_special(name: str) -> bool:
    """Whether a parameter of this canonical name is stored otherwise: `outputs` has it."""
    return bool(_NAME.match(name) or _ROUTER.search(name))


def outputs(
    tensors: Mapping[str, LazyTensor], form: Form, advance: Callable[[str, int], None]
) -> dict[str, Output]:
    """The tensors to write for routers and experts, from the parameters by canonical name.

    `advance(name, num_bytes)` is called as parameters are written.
    """
    found: dict[str, Output] = {}

    def rows(name: str, start: int, stop: int) -> np.ndarray:
        part = tensors[name].rows(start, stop)
        advance(name, part.nbytes)
        return part

    def one(name: str, expert: int) -> Iterator[np.ndarray]:
        yield rows(name, expert, expert + 1)[0]

    def whole(name: str) -> Iterator[np.ndarray]:
        for start, stop in tensors[name].chunks():
            yield rows(name, start, stop)

    def by_turns(names: list[str]) -> Iterator[np.ndarray]:
        for expert in range(tensors[names[0]].shape[0]):  # [1, (in,) out] of each part
            parts = [np.moveaxis(rows(name, expert, expert + 1), 1, -1) for name in names]
            yield np.ascontiguousarray(np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1))

    for name, tensor in tensors.items():
        match = _NAME.match(name)
        if _ROUTER.search(name):
            own = _ROUTER.sub(".mlp.gate.", name) if form == "separate" else name
            found[own] = Output(tensor.shape, tensor.dtype, whole(name))
        if match is None:
            continue
        stored = stored_names(name, tensor.shape[0], form)
        if form == "separate":
            for expert, own in enumerate(stored):
                found[own] = Output(tensor.shape[1:], tensor.dtype, one(name, expert))
            continue
        parts = [name]
        if match["module"] in _TURNS:  # both lead to one tensor, whose gate comes first
            parts = [f"{match['stem']}.{module}.{match['leaf']}" for module in _TURNS]
        experts, out, *inner = tensor.shape
        shape = (experts, *inner, out * len(parts))
        found[stored[0]] = Output(shape, tensor.dtype, by_turns(parts))
    return found

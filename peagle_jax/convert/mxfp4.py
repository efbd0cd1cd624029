"""MXFP4 weights, dequantised exactly while they are read.

OCP Microscaling Formats (MX) 1.0: 32 elements of four bits (E2M1: sign, two exponent bits,
one mantissa bit) share a scale of eight bits (E8M0: 2 ** (code - 127); code 255 is NaN).
gpt-oss checkpoints keep their experts so. For an expert weight `w` they have

    w_blocks  U8 [experts, out, in / 32, 16]   two elements a byte, the low four bits first
    w_scales  U8 [experts, out, in / 32]

and a checkpoint in bfloat16 would have `w` of shape [experts, in, out]: what `Mxfp4Reader`
gives, so that nothing above it knows the packed form.
"""

from __future__ import annotations

import functools
from pathlib import Path

import ml_dtypes
import numpy as np

from peagle_jax.convert.base_reader import Reader
from peagle_jax.errors import InputError

BLOCK = 32  # elements that share a scale
QUANT_METHOD = "mxfp4"  # how a config.json names it
STORAGE = "MXFP4"
_BYTES = BLOCK // 2
_BLOCKS, _SCALES = "_blocks", "_scales"
_BF16 = np.dtype(ml_dtypes.bfloat16)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_NAN = 255  # the code
_SCALE_BIAS = 127
# Bytes looked up at a time: their indices and the table stay in a core's cache.
_PIECE = 1 << 15


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values of packed blocks, bfloat16 `[..., blocks * 32]`.

    Every value is exact: an element has one mantissa bit, so that bfloat16 holds its product
    with any scale, subnormal ones included. Products beyond bfloat16's range (elements of 2
    and more under the scales 253 and 254) are Inf. Under the scale 255 all 32 values are NaN,
    as the specification says; transformers takes that scale for 2 ** 128.

    Args:
        blocks: uint8 `[..., blocks, 16]`, element 2i in the low half of byte i.
        scales: uint8 `[..., blocks]`.
    """
    assert blocks.shape == (*scales.shape, _BYTES), (blocks.shape, scales.shape)
    table = _pairs()
    flat, exponents = blocks.reshape(-1, _BYTES), scales.reshape(-1, 1)
    out = np.empty(flat.shape, np.uint32)
    rows = _PIECE // _BYTES
    for start in range(0, len(flat), rows):
        piece = slice(start, start + rows)
        index = exponents[piece].astype(np.intp) << 8 | flat[piece]
        np.take(table, index, out=out[piece], mode="clip")  # "raise" would buffer the output
    return out.view(_BF16).reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


@functools.cache
def _pairs() -> np.ndarray:
    """The two bfloat16 values of (scale << 8 | byte), as the uint32 that they are in memory."""
    elements = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
    scales = np.arange(256)
    with np.errstate(over="ignore"):  # see `dequantize`: some products are Inf
        values = np.ldexp(elements, scales[:, None] - _SCALE_BIAS).astype(_BF16)
    values[SCALE_NAN] = np.nan
    byte = np.arange(256)
    pairs = np.stack([values[:, byte & 0xF], values[:, byte >> 4]], axis=-1)
    return np.ascontiguousarray(pairs).view(np.uint32).reshape(-1)


class Mxfp4Reader(Reader):
    """A reader whose MXFP4 tensors appear as the bfloat16 ones that they stand for.

    `w_blocks` and `w_scales` become `w`, `[experts, in, out]`; other tensors stay as they
    are. Rows are experts: one is packed in memory beside its values at any time.
    """

    def __init__(self, stored: Reader):
        self._stored = stored
        self.path, self.format, self.files = stored.path, stored.format, stored.files
        self.config, self.generation_config = stored.config, stored.generation_config
        self.chunk_bytes = stored.chunk_bytes
        self._packed = _packed_names(stored)

    def stored(self) -> Reader:
        return self._stored

    def names(self) -> list[str]:
        hidden = {stem + suffix for stem in self._packed for suffix in (_BLOCKS, _SCALES)}
        return [name for name in self._stored.names() if name not in hidden] + self._packed

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._stored.shape(name)
        experts, out, blocks, _ = self._stored.shape(name + _BLOCKS)
        return experts, blocks * BLOCK, out

    def dtype(self, name: str) -> np.dtype:
        return _BF16 if name in self._packed else self._stored.dtype(name)

    def storage(self, name: str) -> str:
        return STORAGE if name in self._packed else self._stored.storage(name)

    def nbytes(self, name: str) -> int:
        if name not in self._packed:
            return self._stored.nbytes(name)
        return self._stored.nbytes(name + _BLOCKS) + self._stored.nbytes(name + _SCALES)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """A view for packed tensors: their own order in memory is `[experts, out, in]`."""
        return self.rows_at(name, start, stop, slice(None))

    def rows_at(self, name: str, start: int, stop: int, last: slice) -> np.ndarray:
        if name not in self._packed:
            return self._stored.rows_at(name, start, stop, last)
        blocks = self._stored.rows(name + _BLOCKS, start, stop)[:, last]
        scales = self._stored.rows(name + _SCALES, start, stop)[:, last]
        return dequantize(blocks, scales).swapaxes(1, 2)


def packed_names(name: str) -> tuple[str, str]:
    """The stored tensors, blocks and scales, of a packed one."""
    return name + _BLOCKS, name + _SCALES


def dequantised(reader: Reader) -> Reader:
    """`reader` itself, or with its MXFP4 tensors as bfloat16.

    Raises InputError on a quantisation that is not known, and on blocks and scales that do
    not belong together; no weights are read for it.
    """
    quantisation = (reader.config or {}).get("quantization_config")
    packed = any(name.endswith((_BLOCKS, _SCALES)) for name in reader.names())
    if quantisation is not None:
        where = f"{Path(reader.path).parent / 'config.json'}: quantization_config.quant_method"
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        if method != QUANT_METHOD:
            raise InputError(f"{where}: found {method!r}, expected {QUANT_METHOD!r} or no such key")
        if not packed:
            raise InputError(f"{where}: found {method!r} and no *{_BLOCKS} tensors, expected some")
    return Mxfp4Reader(reader) if packed else reader


def _packed_names(reader: Reader) -> list[str]:
    """Names of the packed tensors, without their endings."""
    names = set(reader.names())
    for name in sorted(names):
        for own, other in ((_BLOCKS, _SCALES), (_SCALES, _BLOCKS)):
            partner = name.removesuffix(own) + other
            if name.endswith(own) and partner not in names:
                raise reader.fail(f"{partner}: found no such tensor, expected it beside {name}")
    stems = [n.removesuffix(_BLOCKS) for n in reader.names() if n.endswith(_BLOCKS)]
    for stem in stems:
        if stem in names:
            raise reader.fail(f"{stem}: found packed and unpacked, expected one of them")
        blocks, scales = reader.shape(stem + _BLOCKS), reader.shape(stem + _SCALES)
        for name in (stem + _BLOCKS, stem + _SCALES):
            if reader.dtype(name) != np.uint8:
                raise reader.fail(f"{name}: found dtype {reader.dtype(name)}, expected uint8")
        if len(blocks) != 4 or blocks[-1] != _BYTES:
            raise reader.fail(
                f"{stem}{_BLOCKS}: found shape {list(blocks)}, "
                f"expected [experts, out, blocks, {_BYTES}]"
            )
        if scales != blocks[:-1]:
            raise reader.fail(
                f"{stem}{_SCALES}: found shape {list(scales)}, expected {list(blocks[:-1])}, "
                "one scale a block"
            )
    return stems

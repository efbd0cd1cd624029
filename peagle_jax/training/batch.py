"""What a training step is given: documents packed into rows of one length."""

from __future__ import annotations

from flax import struct
from jaxtyping import Array, Bool, Int


@struct.dataclass
class PackedBatch:
    """Documents packed one after the other; padding, if any, at the end of a row.

    tokens: int32 ids.
    documents: 1, 2, .. within a row; 0 = padding.
    positions: of a token within its document, from 0.
    answer: the token belongs to an answer, so that it may be a label.
    """

    tokens: Int[Array, "batch length"]
    documents: Int[Array, "batch length"]
    positions: Int[Array, "batch length"]
    answer: Bool[Array, "batch length"]

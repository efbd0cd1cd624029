"""A set of ids that stays small: it keeps 16 bytes of each."""

from __future__ import annotations

import hashlib

import numpy as np
from jaxtyping import UInt8


class IdSet:
    """Remembers ids by their hashes: about 100 bytes an id, however long ids are.

    (64 of an id's bytes object, 16 to 54 of the set's table.) Two of a million ids are taken
    for one another with a probability of 10^-27.
    """

    BYTES = 16  # of an id

    def __init__(self) -> None:
        self._digests: set[bytes] = set()

    def add(self, key: str) -> bool:
        """Adds an id; False where it was there."""
        before = len(self._digests)
        self._digests.add(_digest(key))
        return len(self._digests) > before

    def digests(self) -> UInt8[np.ndarray, "ids bytes"]:
        """What it keeps of each id, in some order."""
        return np.frombuffer(b"".join(self._digests), np.uint8).reshape(-1, self.BYTES)

    @classmethod
    def of(cls, digests: UInt8[np.ndarray, "ids bytes"]) -> IdSet:
        """The set whose `digests` these are."""
        made = cls()
        made._digests = {row.tobytes() for row in digests}
        return made

    def __contains__(self, key: str) -> bool:
        return _digest(key) in self._digests

    def __len__(self) -> int:
        return len(self._digests)


def _digest(key: str) -> bytes:
    # JSON strings may hold half of a surrogate pair.
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=IdSet.BYTES).digest()

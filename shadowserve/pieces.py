"""Sets of pieces: which chunks of a list are there, in any order, as the wire and the programs have them.

A lookup answers which chunks are stored, a fetch which are in place. How many leading ones that makes follows from the
set, for whoever needs a prefix without a gap; what needs other pieces takes those.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["Flags", "leading", "pack", "unpack"]

Flags = npt.NDArray[np.bool_]
"""One for each member of a list: whether it is in the set."""


def leading(flags: Flags) -> int:
    """Return how many members of the list come before the first that is not in the set."""
    missing = np.flatnonzero(~flags)
    return int(missing[0]) if len(missing) else len(flags)


def pack(flags: Flags) -> bytes:
    """Return the bytes of the wire: bit ``i % 8`` of byte ``i // 8``, the lowest first, is member ``i``."""
    return np.packbits(flags, bitorder="little").tobytes()


def unpack(data: bytes, count: int) -> Flags:
    """Return the set of a list of ``count`` members that somebody has sent; no bytes at all are the empty set.

    Raises:
        ValueError: the bytes are of a list of another length, or say something of members behind its end.
    """
    if not data:
        return np.zeros(count, np.bool_)
    if len(data) != -(-count // 8):
        raise ValueError(f"a set of {count} has {-(-count // 8)} bytes, this one {len(data)}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.bool_)
    if bits[count:].any():
        raise ValueError(f"a set of {count} has a member behind its end")
    return bits[:count]

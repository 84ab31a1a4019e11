"""Sets of pieces: which are there, in any order, as the wire and the programs have them.

A lookup answers which chunks are stored, a fetch which pieces are in place: layers of chunks. How many leading chunks
or layers that makes follows from the set, for whoever needs a prefix without a gap; what needs others takes those.

A set of the pieces of one group is an array of layers times chunks; on the wire, member ``layer * chunks + chunk``.
"""

import numpy as np
import numpy.typing as npt

__all__ = ["Flags", "leading", "leading_chunks", "leading_layers", "pack", "unpack"]

Flags = npt.NDArray[np.bool_]
"""One for each member of a list, or one for each piece, by layer and chunk: whether it is in the set."""


def leading(flags: Flags) -> int:
    """Return how many members of the list come before the first that is not in the set."""
    missing = np.flatnonzero(~flags)
    return int(missing[0]) if len(missing) else len(flags)


def leading_chunks(pieces: Flags, wanted: Flags) -> int:
    """Return how many leading chunks lack no layer that is wanted of them."""
    return leading(np.logical_and.reduce(pieces | ~wanted, axis=0))


def leading_layers(pieces: Flags, wanted: Flags) -> int:
    """Return how many leading layers are there for every chunk that they are wanted of."""
    return leading(np.logical_and.reduce(pieces | ~wanted, axis=1))


def pack(flags: Flags) -> bytes:
    """Return the bytes of the wire: bit ``i % 8`` of byte ``i // 8``, the lowest first, is member ``i``."""
    return np.packbits(flags, axis=None, bitorder="little").tobytes()


def unpack(data: bytes, *shape: int) -> Flags:
    """Return the set of a list of so many members, or of so many layers and chunks, that somebody has sent.

    No bytes at all are the empty set.

    Raises:
        ValueError: the bytes are of a list of another length, or say something of members behind its end.
    """
    count = int(np.prod(shape))
    if not data:
        return np.zeros(shape, np.bool_)
    if len(data) != -(-count // 8):
        raise ValueError(f"a set of {count} has {-(-count // 8)} bytes, this one {len(data)}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.bool_)
    if bits[count:].any():
        raise ValueError(f"a set of {count} has a member behind its end")
    return bits[:count].reshape(shape)

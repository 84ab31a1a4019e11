"""Sets of chunks and pieces, in programs and on the wire.

A lookup returns the set of stored chunks, a fetch the set of pieces (layers of chunks) in place. The set of a group's
pieces is a boolean array of shape [layers, chunks]; on the wire, item ``layer * chunks + chunk``.
"""

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
"""True for each item in the set: shape [items], or [layers, chunks] for pieces."""


def leading(flags: Flags) -> int:
    """Return the number of leading items that are in the set."""
    missing = np.flatnonzero(~flags)
    return int(missing[0]) if len(missing) else len(flags)


def leading_chunks(pieces: Flags, wanted: Flags) -> int:
    """Return the number of leading chunks with all wanted layers."""
    return leading(np.logical_and.reduce(pieces | ~wanted, axis=0))


def leading_layers(pieces: Flags, wanted: Flags) -> int:
    """Return the number of leading layers that are complete in all chunks that want them."""
    return leading(np.logical_and.reduce(pieces | ~wanted, axis=1))


def pack(flags: Flags) -> bytes:
    """Return the bytes on the wire: item ``i`` is bit ``i % 8`` of byte ``i // 8``, lowest bit first."""
    return np.packbits(flags, axis=None, bitorder="little").tobytes()


def unpack(data: bytes, *shape: int) -> Flags:
    """Return the set of the given shape from bytes on the wire; no bytes are the empty set.

    Raise ValueError if they do not fit the shape.
    """
    count = int(np.prod(shape))
    if not data:
        return np.zeros(shape, np.bool_)
    if len(data) != -(-count // 8):
        raise ValueError(f"a set of {count} has {-(-count // 8)} bytes, this one {len(data)}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(np.bool_)
    if bits[count:].any():
        raise ValueError(f"a set of {count} has a bit after its end")
    return bits[:count].reshape(shape)

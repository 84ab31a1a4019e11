"""Which pieces of an order go in one request, ``KV.LAYERS`` of our storage server, and which by ranges.

Layer by layer, an order is rows of the same chunks, a layer of each. One request for all rows is answered in one
stream, so each layer has the whole link, and the server knows what the reader computes meanwhile. It pays where the
stream is longer than what a request takes: below a number of bytes (ObjectCache, equation 2) ranges stay, of which
many are on their way at the same time. That number is what the link carries while one request is answered.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from dpu_dataplane.sources.source import Order
from shadowserve.keys import storage_key
from shadowserve.pieces import leading
from shadowserve.resp import encode_command

__all__ = ["LayerRequest", "Threshold", "layer_request"]

KEYS_MAX: Final = 8192
"""Of one request: the server's limit, and the C core's."""
LAYERS_MAX: Final = 1024
"""Of one request: the server's limit."""
_WINDOW_S_MAX: Final = 3600.0
_ROUNDS: Final = 32
"""That the link's rate is the highest of: a short one, or one that waited for devices, says nothing of it."""


class LayerRequest(NamedTuple):
    """An order's pieces in one request.

    Attributes:
        layers: rows of pieces.
        keys: pieces of a row.
        command: as it goes over the wire.
    """

    layers: int
    keys: int
    command: bytes


def layer_request(order: Order, indexes: Sequence[int]) -> LayerRequest | None:
    """Return the request for an order's pieces; None where they are not rows of the same chunks, or too many.

    Args:
        order: layer by layer.
        indexes: of its pieces that are to be asked for, in order.
    """
    pieces = order.pieces[list(indexes)]
    group, chunk, layer = (pieces[name].astype(np.int64) for name in ("group", "chunk", "layer"))
    keys = leading(layer == layer[0])
    layers = len(pieces) // keys
    if layers * keys < len(pieces) or keys > KEYS_MAX or layers > LAYERS_MAX or (group != group[0]).any():
        return None
    chunk, layer = chunk.reshape(layers, keys), layer.reshape(layers, keys)
    rows = (chunk == chunk[0]).all() and (layer == layer[:, :1]).all()
    if not rows or (np.diff(chunk[0]) <= 0).any() or (np.diff(layer[:, 0]) <= 0).any():
        return None
    names = [storage_key(order.keys[index]) for index in indexes[:keys]]
    window_us = int(1e6 * min(order.window_s, _WINDOW_S_MAX))
    return LayerRequest(layers, keys, encode_command("KV.LAYERS", _text(layer[:, 0].tolist()), 0, window_us, *names))


def _text(layers: Sequence[int]) -> str:
    """Return numbers that rise, as ranges."""
    edges = [place for place in range(1, len(layers)) if layers[place] != layers[place - 1] + 1]
    runs = [layers[begin:end] for begin, end in zip([0, *edges], [*edges, len(layers)], strict=True)]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class Threshold:
    """From how many stored bytes on one request is made.

    Args:
        bytes_min: that number; None: what the link carries while a request is answered, as far as it is known.
    """

    def __init__(self, bytes_min: int | None) -> None:
        self._bytes_min = bytes_min
        self._rates: deque[float] = deque([0.0], _ROUNDS)

    def note(self, received_bytes: int, seconds: float) -> None:
        """Take note of what a batch has received, and how long it took."""
        self._rates.append(received_bytes / max(seconds, 1e-6))

    def bytes_min(self, latency_s: float) -> float:
        """Return the number for a server that answers a small request after so long."""
        return max(self._rates) * latency_s if self._bytes_min is None else self._bytes_min

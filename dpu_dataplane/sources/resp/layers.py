"""Batches as one request to each node, ``KV.LAYERS`` of our storage server, instead of a range request for each piece.

In layer order, a node's part of a batch is rows of the same records, one layer in each row. One request for all rows is
answered as one stream: each layer gets all bandwidth of the link, and the server knows how long the engine computes
with it. That pays above the link's bandwidth-delay product (ObjectCache, equation 2); below it, many range requests are
in flight.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from dpu_dataplane.plan import FetchPlan
from shadowserve.keys import storage_key
from shadowserve.pieces import leading
from shadowserve.resp import encode_command

KEYS_MAX: Final = 8192  # most keys of a request: the limit of the server and of the C core
LAYERS_MAX: Final = 1024  # most layers of a request: the limit of the server
_WINDOW_S_MAX: Final = 3600.0
_RATE_MARGIN: Final = 1.25
_BITS_PER_S_MIN: Final = 10_000_000  # ten times the server's default of layers_bits_per_s_min, below which it refuses
_BATCHES: Final = 32
"""Batches of which the fastest gives the link's rate: short ones, and those that waited for devices, are slower."""


class LayerRequest(NamedTuple):
    """A node's pieces of a batch in one request: the encoded command, and ``layers`` rows of ``keys`` pieces each."""

    command: bytes
    layers: int
    keys: int


def layer_request(plan: FetchPlan, piece_ids: Sequence[int]) -> LayerRequest | None:
    """Return the request for some pieces of a plan in layer order; None if they are no rows of the same records."""
    pieces = plan.pieces[list(piece_ids)]
    record = pieces["chunk"].astype(np.int64) << 32 | pieces["group"]
    layer = pieces["layer"].astype(np.int64)
    keys = leading(layer == layer[0])
    layers = len(pieces) // keys
    if layers * keys < len(pieces) or keys > KEYS_MAX or layers > LAYERS_MAX:
        return None
    record, layer = record.reshape(layers, keys), layer.reshape(layers, keys)
    rows = (record == record[0]).all() and (layer == layer[:, :1]).all()
    if not rows or (np.diff(record[0]) <= 0).any() or (np.diff(layer[:, 0]) <= 0).any():
        return None
    names = [storage_key(plan.keys[piece]) for piece in piece_ids[:keys]]
    window_us = int(1e6 * min(plan.window_s, _WINDOW_S_MAX))
    rate = _bits_per_s(plan, int(pieces["body_length"].sum()))
    command = encode_command("KV.LAYERS", _ranges_text(layer[:, 0].tolist()), rate, window_us, *names)
    return LayerRequest(command, layers, keys)


def _bits_per_s(plan: FetchPlan, stored_bytes: int) -> int:
    """Return the rate at which a node's stored bytes are to arrive, its share of the plan's rate; 0 for no limit.

    The server gives what remains of the link to others. A little more than needed, because delivering keeps the rate.
    """
    if not plan.rate:
        return 0
    piece_bytes = np.array([part.piece_bytes for part in plan.parts])[plan.pieces["group"]]
    delivered_bytes = int(((plan.layers[:, 1] - plan.layers[:, 0]) * piece_bytes).sum())
    return max(int(_RATE_MARGIN * 8 * plan.rate * stored_bytes / delivered_bytes), _BITS_PER_S_MIN)


def _ranges_text(layers: Sequence[int]) -> str:
    edges = [place for place in range(1, len(layers)) if layers[place] != layers[place - 1] + 1]
    runs = [layers[begin:end] for begin, end in zip([0, *edges], [*edges, len(layers)], strict=True)]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


class Threshold:
    """The number of stored bytes from which a batch is one request; None for the link's bandwidth-delay product."""

    def __init__(self, bytes_min: int | None) -> None:
        self._bytes_min = bytes_min
        self._rates: deque[float] = deque([0.0], _BATCHES)

    def note(self, received_bytes: int, seconds: float) -> None:
        self._rates.append(received_bytes / max(seconds, 1e-6))

    def bytes_min(self, latency_s: float) -> float:
        return max(self._rates) * latency_s if self._bytes_min is None else self._bytes_min

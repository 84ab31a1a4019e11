"""The load of a node: how long the bytes that wait for its clients need at its link's rate."""

from math import inf
from typing import Final

LOAD_US_MAX: Final = 60_000_000
_FIRST_BYTES_PER_S: Final = 1.25e9  # 10 Gbit/s, before the first measurement
_SMOOTHING: Final = 0.3  # weight of a measurement that is lower than the rate so far; a higher one counts at once


class LinkLoad:
    """Bytes that wait for clients, and the rate at which bytes leave. Needs the node's lock."""

    def __init__(self) -> None:
        self.replies_bytes = 0  # bytes of replies that could be sent now
        self.layers_bytes = 0  # bytes of requests for layers that are not part of replies yet, and may be sent soon
        self.is_asked = False  # a client has asked for the load
        self._bytes_per_s = 0.0  # not measured yet
        self._measured_s, self._sent_bytes, self._was_busy = inf, 0, False

    def measure(self, sent_bytes: int, now_s: float) -> None:
        """Measure the link's rate since the last call, if bytes have waited then and wait now."""
        busy = self.replies_bytes > 0
        sent, elapsed_s = sent_bytes - self._sent_bytes, now_s - self._measured_s
        if busy and self._was_busy and sent > 0 and elapsed_s > 0:
            rate = sent / elapsed_s
            smoothed = (1 - _SMOOTHING) * self._bytes_per_s + _SMOOTHING * rate
            self._bytes_per_s = max(rate, smoothed)
        self._measured_s, self._sent_bytes, self._was_busy = now_s, sent_bytes, busy

    def microseconds(self, bits_per_s: float) -> int:
        """Return the load, at most ``LOAD_US_MAX``; ``bits_per_s``: configured capacity of the link, 0 if unknown.

        A configured capacity comes first: clients behind slower links of their own lower what is measured.
        """
        rate = bits_per_s / 8 or self._bytes_per_s or _FIRST_BYTES_PER_S
        return min(round(1e6 * (self.replies_bytes + self.layers_bytes) / rate), LOAD_US_MAX)

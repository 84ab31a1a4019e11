"""How long the bucket is expected to take, by how long it has taken lately."""

from typing import Final

_REQUESTS: Final = 8
"""After so many what was known before counts half."""
_KEPT: Final = 0.9
_FIRST_S: Final = 0.05
_FIRST_BYTES_PER_S: Final = 100e6
"""What is expected before anything is known: S3 in its own region (docs/object-storage.md)."""


class Pace:
    """Requests that begin and end, several at a time. Not for several threads at once; times are passed in."""

    def __init__(self) -> None:
        self._busy_s, self._bytes = _FIRST_S, _FIRST_S * _FIRST_BYTES_PER_S  # while something was under way
        self._request_s = _FIRST_S  # mean of one
        self._ended = self._under_way = 0
        self._seen_s = 0.0

    def begin(self, now_s: float) -> None:
        """Hear that a request begins."""
        self._pass(now_s)
        self._under_way += 1

    def end(self, now_s: float, began_s: float, size: int) -> None:
        """Hear that a request ends that has brought so many bytes; 0 of one that failed, which counts as busy time."""
        self._pass(now_s)
        self._under_way -= 1
        self._bytes += size
        self._ended += 1
        if size:
            self._request_s = _KEPT * self._request_s + (1 - _KEPT) * (now_s - began_s)
        if self._ended % _REQUESTS == 0:
            self._busy_s, self._bytes = self._busy_s / 2, self._bytes / 2

    def _pass(self, now_s: float) -> None:
        if self._under_way:
            self._busy_s += max(0.0, now_s - self._seen_s)
        self._seen_s = now_s

    def expected_s(self, size: int) -> float:
        """Return how long so many bytes will take, what is under way and waits before them included.

        As long as one request at least, and no less than what all of them together have brought in a second allows.
        """
        return max(self._request_s, size * self._busy_s / max(self._bytes, 1.0))

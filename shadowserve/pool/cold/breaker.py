"""A circuit breaker: stops using a bucket for a while after some failures, so that clients do not wait for it."""

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from shadowserve.errors import ShadowServeError

_log = logging.getLogger(__name__)

_STRIKES: Final = 3
_PAUSE_S: Final = 1.0
_PAUSE_MAX_S: Final = 30.0
_OF_ONE_OBJECT: Final = frozenset({"absent", "damaged"})
"""Failures that concern an object and not the bucket."""


class Breaker:
    """Failures and successes of one kind of operation, from any thread."""

    def __init__(self, operation: str, clock_s: Callable[[], float]) -> None:
        """``operation``: its name in the log; ``clock_s``: monotonic."""
        self.failures: Counter[str] = Counter()  # failures by reason; none ever decreases
        self._operation = operation
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._strikes = 0
        self._pause_s = _PAUSE_S
        self._until_s = 0.0
        self._failing_since_s: float | None = None
        self.last_error = ""  # text of the last failure that concerns the bucket; empty after a success

    @property
    def away(self) -> bool:
        return self._clock_s() < self._until_s

    @property
    def failing_s(self) -> float:
        """Time since operations began to fail, at least three in a row; 0 while they succeed."""
        since_s = self._failing_since_s
        return 0.0 if since_s is None or self._strikes < _STRIKES else max(self._clock_s() - since_s, 1e-3)

    def refusal(self, operation: str) -> ShadowServeError:
        """Return the error of an operation that is not tried while the bucket is away."""
        return ShadowServeError(f"cannot {operation}: the bucket has failed and is not used now: {self.last_error}")

    def failed(self, reason: str, error: object) -> None:
        """Count a failure. The third in a row makes the bucket away, each time for twice as long."""
        with self._lock:
            self.failures[reason] += 1
            if reason in _OF_ONE_OBJECT:
                return
            self._strikes += 1
            now_s = self._clock_s()
            self.last_error = " ".join(str(error).split())
            if self._failing_since_s is None:
                self._failing_since_s = now_s
            if self._strikes < _STRIKES or now_s < self._until_s:
                return
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _PAUSE_MAX_S)
            self._until_s = now_s + pause_s
        _log.warning("s3_away operation=%s reason=%s pause_s=%g error=%r", self._operation, reason, pause_s, str(error))

    def succeeded(self) -> None:
        if not self._strikes:
            return
        with self._lock:
            was_away = self._strikes >= _STRIKES
            self._strikes, self._pause_s, self._until_s = 0, _PAUSE_S, 0.0
            self._failing_since_s, self.last_error = None, ""
        if was_away:
            _log.info("s3_back operation=%s", self._operation)

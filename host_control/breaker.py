"""A circuit breaker for calls to a peer."""

import threading
import time
from collections.abc import Callable


class Breaker:
    """Pauses calls to a peer after repeated failures, and always tries again.

    Closed until ``failures`` calls in a row have failed; then open for ``backoff`` seconds, doubled with each further
    failure up to ``backoff_max_s``. When the time is over one call is let through as a probe: its success closes the
    breaker, its failure opens it again. A probe that never reports counts as lost after ``backoff_max_s`` more seconds.
    """

    def __init__(
        self, failures: int, backoff: float, backoff_max_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._failures_max = failures
        self._backoff = backoff
        self._backoff_max = backoff_max_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._closed_until_probe = 0.0

    def allow(self) -> bool:
        """Tell if a call may go out now. While open, True makes this call the probe."""
        with self._lock:
            if self._failures < self._failures_max:
                return True
            now = self._clock()
            if now < self._closed_until_probe:
                return False
            self._closed_until_probe = now + self._backoff_max
            return True

    def report(self, success: bool) -> None:
        """Count the outcome of a call that :meth:`allow` let through."""
        with self._lock:
            if success:
                self._failures = 0
                return
            self._failures += 1
            excess = min(self._failures - self._failures_max, 16)
            if excess >= 0:
                self._closed_until_probe = self._clock() + min(self._backoff * 2.0**excess, self._backoff_max)

    @property
    def open(self) -> bool:
        """Calls are turned away."""
        with self._lock:
            return self._failures >= self._failures_max

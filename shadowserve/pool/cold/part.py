"""The bucket as all parts of the cold tier see it, and the base of those parts that have threads."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from shadowserve.pool.cold.breaker import Breaker
from shadowserve.pool.cold.bucket import Bucket
from shadowserve.pool.cold.catalog import Catalog
from shadowserve.pool.cold.config import S3Config


class Breakers:
    """Failures of the bucket, by operation."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.read = Breaker("read", clock_s)
        self.write = Breaker("write", clock_s)
        self.delete = Breaker("delete", clock_s)
        self.list = Breaker("list", clock_s)
        self.clear = Breaker("clear", clock_s)  # lists of what to delete; they must not stop other deletions


@dataclass(frozen=True, slots=True)
class Shared:
    """The bucket, and what is known of it. ``clock_s`` is monotonic."""

    config: S3Config
    bucket: Bucket
    catalog: Catalog
    breakers: Breakers
    clock_s: Callable[[], float]


class Part:
    """A part of the tier."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._config = shared.config
        self._bucket = shared.bucket
        self._catalog = shared.catalog
        self._breakers = shared.breakers
        self._clock_s = shared.clock_s


class ThreadedPart(Part):
    """A part with threads, which wait for a change until close()."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self._changed = threading.Condition()
        self._closed = False
        self.threads: list[threading.Thread] = []

    def _start_threads(self, name: str, count: int, run: Callable[[], None]) -> None:
        for _ in range(count):
            thread = threading.Thread(target=run, name=f"s3-{name}-{len(self.threads)}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

"""Memory that the data plane writes fetched chunks into, or reads chunks to be stored from, and its registration.

Memory that the data plane may still be using is never used for anything else. When a call ends without an answer, or
the data plane does not know the memory any more, :meth:`RegisteredMemory.retire` gives it up, and the next
:meth:`RegisteredMemory.acquire` makes and registers another. What kind of memory it is, is
:mod:`host_control.delivery`'s business.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from host_control.client import DataPlaneClient, MemoryMessage
from host_control.segment import Segment
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import ConfigurationError, DataPlaneError

PROGRESS_BYTES: Final = 4
"""Of the word that says how many leading layers, or chunks, are in place."""


class Memory(Protocol):
    """Memory that can be told of to the data plane.

    Attributes:
        size: bytes.
        memory: as this process uses it: a memoryview, or a tensor of uint8 on the GPU.
        outlives_us: the data plane has a hold of its own on the memory, so that it can be closed here while it is still
            written there. Where it has not, what is written after the close would hit whoever has that memory then.
    """

    size: int
    memory: Any
    outlives_us: bool

    def message(self) -> MemoryMessage:
        """Return what the data plane is told."""

    def published(self) -> None:
        """Take note that the data plane knows it."""

    def arrived(self, offset: int, length: int) -> Any:
        """Return what a finished call has delivered, where :class:`~host_control.layouts.PagedLayout` can read it.

        In the thread that scatters. Work of the GPU may still be on its way, on the delivery's stream.
        """

    def flush(self) -> None:
        """Have what the data plane says to have delivered be there for whoever reads :attr:`memory` from now on.

        In the thread that scatters, while the call goes on; :meth:`arrived` does as much for one that has ended.
        """

    def whole(self) -> bool:
        """Return whether no part of it was taken away, to the last access: what was read where one was, is void."""

    def close(self) -> None:
        """Let go; the memory itself is given back with the last view of it."""


class RegisteredMemory:
    """Memory that the data plane knows, made when first needed and again whenever it was given up.

    It is one region for chunks of several parts, which differ in shape: calls name a part's shape by its index.

    One thread calls :meth:`acquire`, :meth:`lost` and :meth:`retire`; any may read :attr:`current`.

    Args:
        client: of the data plane.
        shapes: of each part's chunks.
        size: bytes of the memory.
        connect_timeout_s: seconds that :meth:`acquire` waits for a connection.
        make: makes memory of so many bytes.
        progress: whether there is a word behind them that says how far a fetch is: in shared memory.

    Attributes:
        progress_offset: of that word, ``PROGRESS_BYTES`` long; ``None`` where there is none.
        retired: how often it was given up.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        shapes: Sequence[ChunkLayout],
        size: int,
        connect_timeout_s: float = 2.0,
        make: Callable[[int], Memory] = Segment.create,
        *,
        progress: bool = False,
    ) -> None:
        self.shapes = tuple(shapes)
        self.size = size
        self.progress_offset = -(-size // PROGRESS_BYTES) * PROGRESS_BYTES if progress else None
        self._made_bytes = size if self.progress_offset is None else self.progress_offset + PROGRESS_BYTES
        self._client = client
        self._make = make
        self._connect_timeout = connect_timeout_s
        self._lock = threading.Lock()
        self._memory: Memory | None = None
        self._memory_id = 0
        self._unreleased: tuple[int, Memory] | None = None
        self.retired = 0

    @property
    def current(self) -> Memory | None:
        """The registered memory, if there is any now."""
        with self._lock:
            return self._memory

    @property
    def memory_id(self) -> int:
        """What the data plane calls :attr:`current`."""
        with self._lock:
            return self._memory_id

    def acquire(self, timeout: float) -> Memory:
        """Return the registered memory, making and registering some if there is none.

        Raises:
            DataPlaneError: the data plane cannot be reached, or refuses.
            ConfigurationError: there is no such memory to be had.
        """
        memory = self.current
        if memory is not None:
            return memory
        breaker = self._client.breakers["register"]
        if not breaker.allow():
            raise DataPlaneError(
                f"registering memory at the data plane {self._client.address} is paused after repeated failures",
                "breaker_open",
            )
        try:
            # Without a connection memory would be made, page by page, for nothing.
            self._client.connect(min(timeout, self._connect_timeout), self.shapes[0])
            if not self._settle():
                raise DataPlaneError(
                    f"no data plane answers at {self._client.address}, to release what was given up", "unreachable"
                )
        except DataPlaneError:
            breaker.report(success=False)
            raise
        try:
            memory = self._make(self._made_bytes)
        except ConfigurationError:
            breaker.report(success=False)
            raise
        try:
            registered = self._client.register(self.shapes, memory.message())
        except DataPlaneError:
            memory.close()  # even if it is known there: nothing is written into it but by a Fetch that names it
            raise
        memory.published()
        with self._lock:
            self._memory, self._memory_id = memory, registered.memory_id
        return memory

    def retire(self, *, release: bool, wait: bool = False) -> None:
        """Give the memory up: whatever the data plane still does to it, it does to memory that nobody reads.

        Memory on which the data plane has no hold of its own stays as it is until it has answered a release.

        Args:
            release: ask the data plane to forget it too (where it may still know it).
            wait: for its answer.
        """
        with self._lock:
            memory, memory_id = self._memory, self._memory_id
            self._memory = None
        if memory is None:
            return
        self.retired += 1
        if release and not memory.outlives_us:
            self._unreleased = (memory_id, memory)
            if wait:
                self._settle()
            return
        if release:
            self._client.release(memory_id, wait=wait)
        memory.close()

    def lost(self, memory: Memory) -> None:
        """Give memory up of which a part was taken away, unless that has been done."""
        if self.current is memory:
            self.retire(release=True)

    def _settle(self) -> bool:
        """Have what was given up released; return whether there is nothing (more) to be released."""
        if self._unreleased is None:
            return True
        memory_id, memory = self._unreleased
        if not self._client.release(memory_id, wait=True):
            return False
        self._unreleased = None
        memory.close()
        return True

    def close(self) -> None:
        """Give the memory up for good."""
        self.retire(release=True, wait=True)
        if self._unreleased is not None:
            _kept.append(self._unreleased[1])


_kept: list[Memory] = []
"""Memory that a data plane which no longer answers may still write into: kept until this process ends."""

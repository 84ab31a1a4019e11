"""An engine's paged memory, shared with a data plane on this machine, whose devices then read chunks straight into it.

The memory stays where it is: its addresses are mapped onto a segment once, with what they hold, before anything is
computed, and the engine goes on as before. What has to be shared is all of it, since any block may be loaded into.

**When bytes may be read, and written again.** The data plane answers once nothing lands any more, however long a device
takes. A call that ends without an answer may have reads under way, which nobody can call back. Then the memory is given
up, as any other would be (:mod:`host_control.registered_memory`): the same addresses are mapped onto another segment,
with a copy of what they hold, and what is still on its way lands in pages that nobody sees. The engine's own thread
does that, between two steps, before anybody hears how the load ended (:meth:`SharedPages.renew`).
"""

import ctypes
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from host_control.client import DataPlaneClient, FetchAnswer
from host_control.registered_memory import PROGRESS_BYTES
from host_control.segment import Segment
from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["PageDelivery", "SharedPages"]

_ALIGNMENT: Final = 4096
"""Of pages: devices reach memory in such pieces, past the page cache."""
_MAP_SHARED_FIXED: Final = 0x01 | 0x10
_READ_WRITE: Final = 3
_LOOK_INTERVAL: Final = 0.02
"""Seconds between two looks whether the call has ended, or shall, while no layer arrives."""
_REFUSED_S: Final = 10.0
"""Until a data plane that refuses paged memory, for its size say, is told of it again; each failure counts."""

_logger = logging.getLogger(__name__)


class SharedPages:
    """Paged memory of one allocation, mapped onto a segment under ``/dev/shm``.

    Args:
        caches: one tensor for each layer, [block, head, token, content], on a CPU. What they lie in becomes shared.
        chunk_blocks: blocks of a chunk.

    Raises:
        ConfigurationError: they do not lie as devices can reach them, or ``/dev/shm`` has no room; nothing has changed.

    Attributes:
        page_bytes: of what a layer keeps of a block.
        lost: it was given up, and :meth:`renew` is due.
        writing: held by whoever writes to it but the engine's thread: or what is written while it is copied is lost.
        private: it could not be shared again.
    """

    def __init__(self, caches: Sequence[Any], chunk_blocks: int) -> None:
        first = caches[0]
        self.page_bytes = int(first[0].nbytes)
        self._storage = first.untyped_storage()
        self._first = [int(cache.storage_offset() * cache.itemsize) for cache in caches]
        self._stride = int(first.stride(0) * first.itemsize)
        self._blocks = int(first.shape[0])
        self.lost = self.private = False
        self.writing = threading.Lock()
        self._check(caches, chunk_blocks)
        self._bytes = -(-int(self._storage.nbytes()) // _ALIGNMENT) * _ALIGNMENT
        self.progress_offset = self._bytes
        try:
            self._storage.share_memory_()  # from now on it is a mapping of its own, that begins at a page
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot move {self._bytes >> 20} MiB of paged memory to shared memory: {error}; enlarge /dev/shm "
                "(containers: --shm-size), or switch host.pages off"
            ) from error
        self.segment = self._map_anew()

    def _check(self, caches: Sequence[Any], chunk_blocks: int) -> None:
        """Raise ConfigurationError unless devices can reach every page, and records can hold it."""
        here = self._storage.data_ptr()
        for cache in caches:
            inner = cache[0].is_contiguous() and cache[0].nbytes == self.page_bytes
            if cache.untyped_storage().data_ptr() != here or cache.stride() != caches[0].stride() or not inner:
                raise ConfigurationError("its layers' pages do not lie in one piece each, in one allocation")
        if any(number % _ALIGNMENT for number in (*self._first, self._stride, self.page_bytes)):
            raise ConfigurationError(
                f"pages of {self.page_bytes} bytes, {self._stride} apart, do not begin at multiples of {_ALIGNMENT}; "
                "use larger blocks"
            )
        if self.page_bytes * chunk_blocks > DECODED_BYTES_MAX:
            raise ConfigurationError(
                f"a layer of a chunk has {self.page_bytes * chunk_blocks} bytes, and {DECODED_BYTES_MAX} are the most; "
                "lower host.chunk_tokens"
            )

    @property
    def address(self) -> int:
        """Where it begins, always the same."""
        return int(self._storage.data_ptr())

    def message(self) -> pb.SharedMemory:
        """Return what the data plane is told of the segment."""
        return self.segment.message()

    def paging(self) -> pb.PagedMemory:
        """Return where the pages are in it."""
        return pb.PagedMemory(first=self._first, stride=self._stride, blocks=self._blocks)

    def word(self) -> memoryview:
        """Return the word behind the pages that says how many layers are in place."""
        return self.segment.memory[self.progress_offset : self.progress_offset + PROGRESS_BYTES]

    def _map_anew(self) -> Segment:
        """Map the memory onto a new segment that holds the same; by the engine's thread, while nobody writes to it."""
        segment = Segment.create(self._bytes + _ALIGNMENT)
        try:
            self._map_onto(segment.descriptor, ctypes.addressof(ctypes.c_char.from_buffer(segment.memory)))
        except BaseException:
            segment.close()
            raise
        return segment

    def _map_onto(self, descriptor: int, copy: int) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_void_p
        ctypes.memmove(copy, self.address, int(self._storage.nbytes()))
        mapped = library.mmap(
            ctypes.c_void_p(self.address), ctypes.c_size_t(self._bytes), _READ_WRITE, _MAP_SHARED_FIXED, descriptor, 0
        )
        if mapped != self.address:
            reason = os.strerror(ctypes.get_errno())
            raise ConfigurationError(f"cannot map paged memory onto a segment of {self._bytes} bytes: {reason}")

    def renew(self) -> None:
        """Have what may still land do so elsewhere, if the memory was given up. By the engine's thread, between steps.

        Where ``/dev/shm`` has no room for that, the memory is the engine's alone from then on.
        """
        if not self.lost or self.private:
            return
        began, before = time.monotonic(), self.segment
        with self.writing:
            try:
                self.segment = self._map_anew()
                self.lost = False
            except ConfigurationError as error:
                self._map_private()
                _logger.warning("shadowserve: nothing is loaded straight into pages any more: %s", error)
        before.close()
        _logger.warning(
            "shadowserve: paged memory was given up, as a call for it had no answer, and replaced in %.0f ms",
            1000 * (time.monotonic() - began),
        )

    def _map_private(self) -> None:
        """Map the memory onto some that nobody else has."""
        self.private = True
        descriptor = os.memfd_create("shadowserve-pages", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, self._bytes)
            with mmap.mmap(descriptor, self._bytes) as copy:
                first = ctypes.c_char.from_buffer(copy)
                self._map_onto(descriptor, ctypes.addressof(first))
                del first
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Remove the segment's name; the memory stays the engine's. If it is used again, it is another segment's."""
        self.segment.unlink()
        self.lost = True


class PageDelivery:
    """Loads chunks into shared pages, as far as they lie on devices of the data plane; in one thread.

    Args:
        client: of the data plane.
        pages: that the data plane is told of when they are first needed, and again when it does not know them.
        shape: of the chunks.
        connect_timeout_s: seconds to wait for a connection.
    """

    def __init__(
        self, client: DataPlaneClient, pages: SharedPages, shape: ChunkLayout, connect_timeout_s: float
    ) -> None:
        self._client = client
        self._pages = pages
        self._shape = shape
        self._connect_timeout = connect_timeout_s
        self._memory_id = 0
        self._not_before = 0.0
        self._segment: Segment | None = None  # that it stands for

    @property
    def obstacle(self) -> str:
        """Why no chunk can be loaded into pages now: ``no_page_devices``, ``pages_refused`` or ``pages_private``."""
        peer = self._client.peer
        if self._pages.private:
            return "pages_private"
        if peer is not None and not peer.page_devices:
            return "no_page_devices"
        return "pages_refused" if time.monotonic() < self._not_before else ""

    def fetch(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        deadline: float,
        cancelled: Callable[[], bool],
        on_layers: Callable[[int], None],
    ) -> FetchAnswer | None:
        """Load the leading chunks of those that lie on devices.

        Args:
            keys: of the chunks.
            blocks: that they go to, chunk after chunk.
            deadline: on the clock of ``time.monotonic()``.
            cancelled: whether to end early.
            on_layers: receives how many leading layers are in place of all chunks.

        Returns:
            What came of it, None where the data plane was not asked. After an answer that is not quiet, nobody may use
            the blocks until :meth:`SharedPages.renew`.
        """
        for _ in range(2):
            try:
                if not self._register(deadline - time.monotonic()):
                    return None
                answer = self._call(keys, blocks, deadline, cancelled, on_layers)
            except DataPlaneError as error:
                _logger.debug("no pages: %s", error)
                return None
            if answer.reason != "unknown_memory":
                break
            self._memory_id = 0  # the daemon has restarted: register again, once
        if not answer.quiet:
            self._pages.lost = True
            self._client.release(self._memory_id, wait=False)
            self._memory_id = 0
        return answer

    def _register(self, left: float) -> bool:
        """Make the pages known, unless they are; return whether they are now."""
        if self._pages.lost or left <= 0 or time.monotonic() < self._not_before:
            return False
        if self._memory_id and self._segment is self._pages.segment:
            return True
        if not self._client.breakers["register"].allow():
            return False
        self._client.connect(min(left, self._connect_timeout), self._shape)
        if self.obstacle:
            return False
        try:
            registered = self._client.register([self._shape], self._pages.message(), self._pages.paging())
        except DataPlaneError as error:
            if error.outcome == "refused":
                self._not_before = time.monotonic() + _REFUSED_S
            raise
        self._memory_id, self._segment = registered.memory_id, self._pages.segment
        return True

    def _call(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        deadline: float,
        cancelled: Callable[[], bool],
        on_layers: Callable[[int], None],
    ) -> FetchAnswer:
        from shadowserve import native  # an engine loads the C core only where it has to

        word, job_id, seen = self._pages.word(), f"pages-{secrets.token_hex(8)}", 0
        word[:] = bytes(PROGRESS_BYTES)
        left = max(deadline - time.monotonic(), 0.001)
        offset = self._pages.progress_offset
        call = self._client.start_fetch_pages(job_id, self._memory_id, self._shape, keys, blocks, left, offset)
        while not call.done():
            if cancelled():
                self._client.cancel(job_id)
            layers = min(native.progress_wait(word, seen, _LOOK_INTERVAL), self._shape.layers)
            if layers > seen:
                seen = layers
                on_layers(layers)
        return call.result()

    def close(self) -> None:
        """Have the data plane forget the pages; what does not answer may go on writing them."""
        if self._memory_id and not self._client.release(self._memory_id, wait=True):
            self._pages.lost = True
        self._memory_id = 0

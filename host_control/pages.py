"""An engine's paged memory, shared with a data plane on this machine, whose devices read chunks straight into it.

The memory keeps its addresses: they are mapped onto a segment once, with their content, before anything is computed,
and the engine does not notice.

The data plane answers once nothing is written any more, however long a device takes. A call that ends without an answer
may have reads in flight that cannot be cancelled. Then the same addresses are mapped onto another segment, with a copy
of the content, and the reads in flight end in pages that are not used. The engine's thread does that, between two
steps, before vLLM learns how the load ended (:meth:`SharedPages.renew`).
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

from host_control.client import DataPlaneClient, FetchAnswer, FetchCall
from host_control.progress import WordProgress, cancel_if, follow
from host_control.registered_memory import PROGRESS_BYTES
from host_control.segment import Segment
from host_control.transfer import Reason
from shadowserve.chunk import DECODED_BYTES_MAX, ChunkLayout
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.proto import dataplane_pb2 as pb

_ALIGNMENT: Final = 4096
"""Alignment of pages in bytes: devices read into memory in such units, past the page cache."""
_MAP_SHARED_FIXED: Final = 0x01 | 0x10
_READ_WRITE: Final = 3
_LOOK_INTERVAL: Final = 0.02
"""Seconds between two looks at the call's end and at cancellation, while no layer arrives."""
_REFUSED_S: Final = 10.0
"""Seconds until paged memory that a data plane refused, for example for its size, is registered again."""

_logger = logging.getLogger(__name__)


class SharedPages:
    """Paged memory of one allocation, mapped onto a segment under ``/dev/shm``.

    Args:
        caches: One tensor for each layer, [block, head, token, content], on a CPU. Their storage becomes shared.
        chunk_blocks: Blocks in a chunk.

    Raises:
        ConfigurationError: Devices cannot reach the tensors' memory, or ``/dev/shm`` has no room; nothing has changed.

    Attributes:
        page_bytes: Bytes that a layer keeps of a block.
        lost: The memory was given up, and :meth:`renew` is due.
        writing: Lock of every writer but the engine's thread: bytes written while the memory is copied would be lost.
        private: The memory could not be shared again.
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
            self._storage.share_memory_()  # from now on it is a mapping of its own, and page-aligned
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot move {self._bytes >> 20} MiB of paged memory to shared memory: {error}; enlarge /dev/shm "
                "(containers: --shm-size), or switch host.pages off"
            ) from error
        self.segment = self._map_to_new_segment()

    def _check(self, caches: Sequence[Any], chunk_blocks: int) -> None:
        here = self._storage.data_ptr()
        for cache in caches:
            inner = cache[0].is_contiguous() and cache[0].nbytes == self.page_bytes
            if cache.untyped_storage().data_ptr() != here or cache.stride() != caches[0].stride() or not inner:
                raise ConfigurationError("its layers' pages are not contiguous, in one allocation")
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
        return int(self._storage.data_ptr())

    def message(self) -> pb.SharedMemory:
        return self.segment.message()

    def paging(self) -> pb.PagedMemory:
        return pb.PagedMemory(first=self._first, stride=self._stride, blocks=self._blocks)

    def word(self) -> memoryview:
        return self.segment.memory[self.progress_offset : self.progress_offset + PROGRESS_BYTES]

    def _map_to_new_segment(self) -> Segment:
        """Map the memory onto a new segment with a copy of its content; only while nothing else writes to it."""
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
        """Map memory that was given up onto a new segment. Called by the engine's thread, between steps.

        Where ``/dev/shm`` has no room for that, the memory is private from then on.
        """
        if not self.lost or self.private:
            return
        began, before = time.monotonic(), self.segment
        with self.writing:
            try:
                self.segment = self._map_to_new_segment()
                self.lost = False
            except ConfigurationError as error:
                self._map_private()
                _logger.warning("shadowserve: chunks are not loaded straight into pages any more: %s", error)
        before.close()
        _logger.warning(
            "shadowserve: paged memory was given up, because a call for it had no answer, and replaced in %.0f ms",
            1000 * (time.monotonic() - began),
        )

    def _map_private(self) -> None:
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
        """Remove the segment's name; the engine keeps the memory. Sharing it again needs a new segment."""
        self.segment.unlink()
        self.lost = True


class PageDelivery:
    """Loads chunks into shared pages, as far as devices of the data plane hold them; used by one thread.

    The pages are registered when they are first needed, and again when the data plane does not know them any more.
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
        self._segment: Segment | None = None  # segment that is registered

    @property
    def obstacle(self) -> str:
        """Reason why no chunk can be loaded into pages now, or empty: one of :mod:`host_control.vllm.paging`."""
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
        """Load the leading ones of the chunks that devices hold into blocks, chunk after chunk.

        ``on_layers`` receives the number of leading layers that are in place of all chunks, as it grows.

        Returns:
            The outcome; None where the data plane was not asked. After an answer that is not quiet, the blocks must not
            be used until :meth:`SharedPages.renew`.
        """
        for _ in range(2):
            try:
                if not self._register(deadline - time.monotonic()):
                    return None
                job_id, offset = f"pages-{secrets.token_hex(8)}", self._pages.progress_offset
                progress = WordProgress(self._pages.word())  # before the data plane writes there
                left = max(deadline - time.monotonic(), 0.001)
                call = self._client.start_fetch_pages(job_id, self._memory_id, self._shape, keys, blocks, left, offset)
            except DataPlaneError as error:
                _logger.debug("no pages: %s", error)
                return None
            answer = self._follow(call, progress, cancel_if(self._client, job_id, cancelled), on_layers)
            if answer.reason != Reason.UNKNOWN_MEMORY:
                break
            self._memory_id = 0  # the data plane has restarted: register again, once
        if not answer.quiet:
            self._pages.lost = True
            self._client.release(self._memory_id, wait=False)
            self._memory_id = 0
        return answer

    def _register(self, left: float) -> bool:
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
            memory_id = self._client.register([self._shape], self._pages.message(), self._pages.paging())
        except DataPlaneError as error:
            if error.outcome == Reason.REFUSED:
                self._not_before = time.monotonic() + _REFUSED_S
            raise
        self._memory_id, self._segment = memory_id, self._pages.segment
        return True

    def _follow(
        self, call: FetchCall, progress: WordProgress, cancels: Callable[[], bool], on_layers: Callable[[int], None]
    ) -> FetchAnswer:
        for layers in follow(call, progress, self._shape.layers, _LOOK_INTERVAL, cancels):
            on_layers(layers)
        while not call.done():
            cancels()
            progress.wait(self._shape.layers, _LOOK_INTERVAL)
        return call.result()

    def close(self) -> None:
        """Release the pages; without an answer, the data plane may still write to them."""
        if self._memory_id and not self._client.release(self._memory_id, wait=True):
            self._pages.lost = True
        self._memory_id = 0

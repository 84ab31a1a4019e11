"""The catalog of stored records: lookups, cached headers, publications, and the quarantine of faulty records.

A cached header saves a round trip between a lookup and the fetch that follows. It is a hint only: every slice of the
body is checked, and a fetch that fails with a cached header reads the header again.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics, outcome_name
from dpu_dataplane.pinning import Pins
from dpu_dataplane.publishing import Publications
from dpu_dataplane.sources.found import (
    HEADER_CACHE_BYTES,
    Cold,
    Fault,
    Found,
    HeaderCache,
    Stored,
    Unanswered,
    inspect_header,
)
from dpu_dataplane.sources.source import Chain, Source, WaitingRequest, questions
from shadowserve import native
from shadowserve.errors import StorageError, StorageRefusedError
from shadowserve.pieces import Flags
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.record import HeaderPeek
from shadowserve.tier import Tier

_LOOKUP_KEYS: Final = 512
"""Keys in one request of a lookup: their headers are checked while storage answers the next request, and other calls
get their turn on the event loop."""
_QUARANTINE_MAX: Final = 65536  # most keys in quarantine; the oldest are released first

logger = logging.getLogger(__name__)


@dataclass
class ChainLookup:
    """The stored chunks of a chain."""

    tiers: npt.NDArray[np.uint8]  # the :class:`Tier` of each stored chunk with a sound header; 0 for other chunks
    stored_bytes: int = 0  # stored bytes of these chunks
    cold_ms: int = 0  # milliseconds until storage expects to have the cold chunks at hand; 0 without any
    unanswered: Unanswered | None = None  # why storage has not answered for some chunks, which count as not stored
    unanswered_chunks: int = 0

    @property
    def present(self) -> Flags:
        present: Flags = self.tiers != Tier.NONE
        return present


_LookupKey = tuple[ChainLookup, int, bytes, bytes]
"""The result of the chain, the position in the chain, the namespace, and the key."""


class Catalog:
    """Records of the source. Methods raise StorageUnavailableError or StorageRefusedError if it does not answer."""

    def __init__(self, source: Source, metrics: Metrics, config: DataPlaneConfig) -> None:
        self._source = source
        self._metrics = metrics
        self.codecs = frozenset(native.codec_implementations())
        self._cache: HeaderCache[tuple[Stored, HeaderPeek]] = HeaderCache(HEADER_CACHE_BYTES)
        self._quarantine: OrderedDict[tuple[bytes, bytes], float] = OrderedDict()  # to its end
        self._quarantine_s = config.quarantine_s
        self._delete_corrupt = config.delete_corrupt
        self._tasks: set[asyncio.Task[None]] = set()
        self._publications = Publications(config.hosts_max)
        self._pins = Pins(config.hosts_max)
        self._pinning = asyncio.Lock()
        self._pins_due: list[bytes] = []  # keys that were stored, and are to be pinned

    @property
    def quarantined(self) -> int:
        return len(self._quarantine)

    async def lookup(self, chains: Sequence[Chain]) -> list[ChainLookup]:
        """Look the chunks of chains up. Reads nothing from object storage."""
        found = [ChainLookup(np.zeros(len(keys), np.uint8)) for _, keys in chains]
        keys_of_chains = [
            (result, position, namespace, key)
            for result, (namespace, keys) in zip(found, chains, strict=True)
            for position, key in enumerate(keys)
            if not (self._quarantine and self.is_quarantined(namespace, key))
        ]
        requests = [keys_of_chains[i : i + _LOOKUP_KEYS] for i in range(0, len(keys_of_chains), _LOOKUP_KEYS)]
        before_ms = 0
        for cold in await asyncio.gather(*map(self._look_up, requests)):
            # Object storage brings the records of a request after those of the requests before it.
            for result, ms in cold:
                result.cold_ms = max(result.cold_ms, before_ms + ms)
            before_ms += max((ms for _, ms in cold), default=0)
        self._metrics.totals["lookup_keys"] += sum(len(keys) for _, keys in chains)
        self._metrics.totals["lookup_hits"] += sum(int(np.count_nonzero(each.present)) for each in found)
        return found

    async def _look_up(self, keys: list[_LookupKey]) -> list[tuple[ChainLookup, int]]:
        """Look keys up, and update the results of their chains; return chain and ms of each cold record."""
        answer = await self._source.find([key for _, _, _, key in keys])
        cold: list[tuple[ChainLookup, int]] = []
        for (result, position, namespace, key), stored in zip(keys, answer, strict=True):
            if isinstance(stored, Stored) and self._is_sound(stored, key, namespace):
                result.tiers[position] = stored.tier
                result.stored_bytes += stored.length
            elif isinstance(stored, Cold):
                result.tiers[position] = Tier.COLD
                result.stored_bytes += stored.length
                cold.append((result, stored.ms))
                self._cache.drop(key)
            elif stored is None:
                self._cache.drop(key)
            elif isinstance(stored, Unanswered):
                result.unanswered = stored
                result.unanswered_chunks += 1
        return cold

    async def prefetch(self, chains: Sequence[Chain]) -> None:
        """Start to read cold records from object storage, first those of each prompt's first chunks."""
        interleaved = zip_longest(*(keys for _, keys in chains))
        keys = [key for chunk in interleaved for key in chunk if key is not None]
        for question in questions(keys):
            await self._source.prefetch(question)

    def expect(self, requests: Sequence[WaitingRequest]) -> None:
        """Pass the waiting requests on to the source, without faulty records."""
        self._source.expect(
            [
                each._replace(
                    chains=[
                        (namespace, [key for key in keys if not self.is_quarantined(namespace, key)])
                        for namespace, keys in each.chains
                    ]
                )
                for each in requests
            ]
            if self._quarantine
            else requests
        )

    async def publish(self, owner: str, keys: Sequence[bytes], lasts_ms: int, *, plain: bool = False) -> pb.Reach:
        """Publish keys that a host will store, or withdraw them; StorageRefusedError beyond the host's share.

        ``plain`` keys will be records that stay in local tiers, if there are any.
        """
        if lasts_ms:
            try:
                changed = self._publications.publish(owner, keys, lasts_ms)
            except StorageRefusedError:
                self._metrics.totals["publications_refused"] += len(keys)
                raise
        else:
            changed = self._publications.withdraw(owner, keys)
        if self._source.publishes_here:
            return pb.REACH_ALL
        if plain and self._source.has_tiers:
            return pb.REACH_DATA_PLANE
        taken = await self._source.publish(changed, lasts_ms) if changed else True
        return pb.REACH_ALL if taken else pb.REACH_NONE

    def forget_host(self, owner: str) -> None:
        """Withdraw the publications of a host that has disconnected. Its pins stay until they end."""
        self._pins.expire()
        if keys := self._publications.forget(owner):
            self._begin(self._withdraw(keys))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a request in the background, until :meth:`close`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _withdraw(self, keys: Sequence[bytes]) -> None:
        try:
            await self._source.publish(keys, 0)
        except StorageError as error:
            logger.debug("withdrawing publications: %s", error)  # they expire

    async def pin(self, owner: str, session: bytes, keys: Sequence[bytes], lasts_ms: int) -> bool:
        """Pin keys for a session of a host, those not stored yet once they are; 0 ms ends its pins.

        Return False if storage knows no pins. StorageRefusedError beyond the host's or the tenant's share.
        """
        async with self._pinning:  # storage receives the changes of a key in the order of the table's
            while self._pins.make_room(owner, len(keys)):
                await asyncio.sleep(0)
            changed, undo = self._pins.pin(owner, session, keys, lasts_ms / 1000)
            taken = False
            try:
                taken = all([await self._pin(some, seconds) for seconds, some in self._by_end(changed)])
            finally:
                if not taken:
                    undo()
        return taken

    def _by_end(self, keys: Sequence[bytes]) -> Collection[tuple[int, list[bytes]]]:
        """Return keys by the seconds for which they are pinned."""
        by_seconds: dict[int, list[bytes]] = {}
        for key in keys:
            by_seconds.setdefault(self._pins.left_s(key), []).append(key)
        return by_seconds.items()

    async def _pin(self, keys: Sequence[bytes], seconds: int) -> bool:
        return all([await self._source.pin(question, seconds) for question in questions(keys)])

    async def _pin_stored(self) -> None:
        """Pin keys that were stored after their pins had been asked for."""
        await asyncio.sleep(0)
        keys, self._pins_due = self._pins_due, []
        for seconds, some in self._by_end(keys):
            try:
                if seconds:
                    await self._pin(some, seconds)
            except StorageError as error:
                level = logging.DEBUG if self._metrics.totals["pins_refused"] else logging.WARNING
                logger.log(level, "%d records were stored, and cannot be pinned: %s", len(some), error)
                self._metrics.totals["pins_refused"] += len(some)

    async def published(self, chains: Sequence[Chain]) -> list[Flags] | None:
        """Return the published chunks of each chain; None if storage takes no publications.

        Without an answer no chunk counts as published: the caller computes instead of waiting.
        """
        keys = [key for _, keys in chains for key in keys]
        found: list[Flags] = []
        for question in questions(keys):
            try:
                flags = await self._pending(question)
            except StorageError as error:
                logger.debug("publications: %s", error)
                flags = np.zeros(len(question), np.bool_)
            if flags is None:
                return None
            found.append(flags)
        ends = np.cumsum([len(keys) for _, keys in chains])[:-1]
        return list(np.split(np.concatenate(found), ends)) if found else [np.zeros(0, np.bool_) for _ in chains]

    async def _pending(self, keys: Sequence[bytes]) -> Flags | None:
        """Return the pending keys; storage does not know those of plain records."""
        if self._source.publishes_here:
            return self._publications.pending(keys)
        flags = await self._source.published(keys)
        return flags if flags is None or not self._source.has_tiers else flags | self._publications.pending(keys)

    async def find(
        self, keys: Sequence[bytes], *, fresh: bool, waiting: bool = True, headers: bool = False
    ) -> list[tuple[Found, bool]]:
        """Look up to QUESTION_KEYS_MAX keys up; return each answer, and whether it came from the cache.

        ``waiting`` waits until object storage has brought cold records, or their ``headers``; otherwise they are Cold.
        """
        entries = {} if fresh else {key: entry[0] for key in keys if (entry := self._cache.get(key)) is not None}
        known = {key: each for key, each in entries.items() if headers or each.tier != Tier.COLD}
        unknown = [key for key in keys if key not in known]
        try:
            found = await self._source.find(unknown) if unknown else ()
        except StorageError as error:
            if not known:
                raise
            found = [Unanswered.of(error)] * len(unknown)  # local tiers may have the known records
        answers = dict(zip(unknown, found, strict=True))
        if waiting and (cold := [key for key, each in answers.items() if isinstance(each, Cold)]):
            warm = await self._source.find_warm(cold, headers=headers)
            if headers:
                warm = [each._replace(tier=Tier.COLD) if isinstance(each, Stored) else each for each in warm]
            answers |= zip(cold, warm, strict=True)
        return [(known[key], True) if key in known else (answers[key], False) for key in keys]

    def keep(self, key: bytes, namespace: bytes, found: Found) -> None:
        """Cache a sound header of a cold record, for the next fetches in layer order."""
        if isinstance(found, Stored):
            peek = inspect_header(found, key, namespace, self.codecs)
            if not isinstance(peek, Fault):
                self._cache.put(key, (found, peek), len(found.header))

    def forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._cache.drop(key)

    def is_quarantined(self, namespace: bytes, key: bytes) -> bool:
        end = self._quarantine.get((namespace, key))
        if end is None:
            return False
        if end > time.monotonic():
            return True
        del self._quarantine[namespace, key]
        return False

    def quarantine(self, namespace: bytes, key: bytes, fault: Fault) -> None:
        """Put a faulty record into quarantine: lookups miss it for a while. Count it, log it, delete it if corrupt.

        For callers of this namespace only: a caller that uses another tenant's key costs that tenant no hit.
        """
        self._metrics.integrity_failures[outcome_name(fault.outcome)] += 1
        self._cache.drop(key)
        if self.is_quarantined(namespace, key):
            return
        self._quarantine[namespace, key] = time.monotonic() + self._quarantine_s
        while len(self._quarantine) > _QUARANTINE_MAX:
            self._quarantine.popitem(last=False)
        deleting = fault.outcome == pb.OUTCOME_CORRUPT and self._delete_corrupt
        logger.warning(
            "record %s is unusable (%s): %s; treated as a miss for %g s%s",
            key.hex(),
            outcome_name(fault.outcome),
            fault.reason,
            self._quarantine_s,
            " and deleted from storage" if deleting else "",
        )
        if deleting:
            self._begin(self._delete(key))

    def release(self, namespace: bytes, key: bytes) -> None:
        """Release a key from quarantine: it was stored again."""
        self._quarantine.pop((namespace, key), None)
        self._cache.drop(key)

    def available(self, key: bytes) -> None:
        self._publications.stored(key)
        if self._pins.left_s(key):
            self._pins_due.append(key)
            if len(self._pins_due) == 1:
                self._begin(self._pin_stored())

    @property
    def storage(self) -> tuple[str, bool]:
        return self._source.name, self._source.connected

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_sound(self, stored: Stored, key: bytes, namespace: bytes) -> bool:
        """Check the header that a lookup found, and cache it. A header equal to the cached one is not checked again."""
        entry = self._cache.get(key)
        if entry is not None and entry[0][:2] == stored[:2] and entry[1].namespace == namespace:
            return True
        checked = inspect_header(stored, key, namespace, self.codecs)
        if isinstance(checked, Fault):
            self.quarantine(namespace, key, checked)
            return False
        self._cache.put(key, (stored, checked), len(stored.header))
        return True

    async def _delete(self, key: bytes) -> None:
        try:
            await self._source.delete(key)
            self._metrics.totals["deleted_records"] += 1
        except StorageError as error:
            logger.info("corrupt record %s could not be deleted: %s", key.hex(), error)

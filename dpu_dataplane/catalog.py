"""What storage holds, as far as the data plane knows: lookups, remembered heads, and the quarantine of faulty records.

A remembered head is a hint that saves a round trip between a lookup and the fetches that follow. It never vouches for a
body: that is checked slice by slice, and a fetch that fails with a remembered head asks again before it believes that.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import numpy as np
import numpy.typing as npt

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics, outcome_name
from dpu_dataplane.publishing import Publications
from dpu_dataplane.sources.source import QUESTION_KEYS_MAX, Cold, Expected, Found, Source, Stored, Unanswered
from shadowserve import native
from shadowserve.errors import CorruptRecordError, NotARecordError, RecordError, StorageError, StorageRefusedError
from shadowserve.pieces import Flags
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.record import HeadPeek, peek_head
from shadowserve.tier import Tier

__all__ = ["Catalog", "Fault", "Looked", "fault_of", "inspect_head"]

_ENTRY_OVERHEAD: Final = 400  # bytes of objects around one remembered head
_ASKED_KEYS: Final = 512
"""In one question of a lookup: their heads are checked while storage answers the next one, and other calls get their
turn on the event loop."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a stored value cannot be used.

    Attributes:
        outcome: an Outcome: CORRUPT, MISMATCH, NOT_A_RECORD or UNSUPPORTED_CODEC.
        reason: one sentence.
        replaceable: whether a Store of the key may put another record in its place. Not where this one is good for
            others: another namespace's, or one in a codec that this build lacks.
    """

    outcome: pb.Outcome
    reason: str
    replaceable: bool = True


def fault_of(error: RecordError) -> Fault:
    """Return the fault that an exception of :mod:`shadowserve.record` stands for."""
    if isinstance(error, NotARecordError):
        return Fault(pb.OUTCOME_NOT_A_RECORD, str(error))
    if isinstance(error, CorruptRecordError):
        return Fault(pb.OUTCOME_CORRUPT, str(error))
    return Fault(pb.OUTCOME_MISMATCH, str(error))


def inspect_head(stored: Stored, key: bytes, namespace: bytes, codecs: Collection[int]) -> Fault | HeadPeek:
    """Check as much of a head as a lookup must: whole, of this key and namespace, decodable."""
    try:
        peek = peek_head(stored.head)
    except RecordError as error:
        return fault_of(error)
    if peek.record_length != stored.length:
        return Fault(
            pb.OUTCOME_CORRUPT, f"the value has {stored.length} bytes, its header says {peek.record_length}: it was cut"
        )
    if peek.key != key:
        return Fault(pb.OUTCOME_MISMATCH, f"it is the record of key {peek.key.hex()}")
    if peek.namespace != namespace:
        return Fault(pb.OUTCOME_MISMATCH, "it is a record of another namespace", False)
    if peek.codec not in codecs:
        return Fault(pb.OUTCOME_UNSUPPORTED_CODEC, f"this build does not decode codec {peek.codec}", False)
    return peek


class _HeadCache:
    """Sound heads by key, the least recently used forgotten first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._entries: OrderedDict[bytes, tuple[Stored, HeadPeek]] = OrderedDict()

    def get(self, key: bytes) -> tuple[Stored, HeadPeek] | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: bytes, stored: Stored, peek: HeadPeek) -> None:
        self.drop(key)
        self._entries[key] = (stored, peek)
        self._bytes += len(stored.head) + _ENTRY_OVERHEAD
        while self._bytes > self._bytes_max:
            self.drop(next(iter(self._entries)))

    def drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry[0].head) + _ENTRY_OVERHEAD


@dataclass
class Looked:
    """What storage has of a chain.

    Attributes:
        tiers: of each chunk that is stored and looks sound, the :class:`Tier`; 0 of any other.
        stored_bytes: of all of these.
        cold_ms: in how many ms storage expects to have the cold ones of them nearer; 0 where there are none.
    """

    tiers: npt.NDArray[np.uint8]
    stored_bytes: int = 0
    cold_ms: int = 0

    @property
    def present(self) -> Flags:
        """Which chunks are stored and look sound, as far as anybody has looked."""
        present: Flags = self.tiers != Tier.NONE
        return present


_Asked = tuple[Looked, int, bytes, bytes]
"""What is found of the chain, the position in it, its namespace, and the key."""


class Catalog:
    """Answers what storage holds."""

    def __init__(self, source: Source, metrics: Metrics, config: DataPlaneConfig) -> None:
        self._source = source
        self._metrics = metrics
        self.codecs = frozenset(native.codec_implementations())
        self._cache = _HeadCache(int(config.head_cache_bytes))
        self._quarantine: OrderedDict[tuple[bytes, bytes], float] = OrderedDict()  # to the time of its end
        self._quarantine_time, self._quarantine_max = config.quarantine_s, config.quarantine_max
        self._delete_corrupt = config.delete_corrupt
        self._tasks: set[asyncio.Task[None]] = set()
        self._publications = Publications(config.hosts_max)

    @property
    def quarantined(self) -> int:
        """Keys in quarantine."""
        return len(self._quarantine)

    async def lookup(self, chains: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[Looked]:
        """Return what is stored of each chain, a namespace and its keys. Reads nothing from object storage.

        Raises:
            StorageUnavailableError, StorageRefusedError: storage did not answer.
        """
        found = [Looked(np.zeros(len(keys), np.uint8)) for _, keys in chains]
        asked = [
            (looked, position, namespace, key)
            for looked, (namespace, keys) in zip(found, chains, strict=True)
            for position, key in enumerate(keys)
            if not (self._quarantine and self.is_quarantined(namespace, key))
        ]
        questions = [asked[first : first + _ASKED_KEYS] for first in range(0, len(asked), _ASKED_KEYS)]
        before_ms = 0
        for cold in await asyncio.gather(*map(self._ask, questions)):
            # What a question has to wait for comes behind what those before it have to.
            for looked, ms in cold:
                looked.cold_ms = max(looked.cold_ms, before_ms + ms)
            before_ms += max((ms for _, ms in cold), default=0)
        self._metrics.lookup_keys += sum(len(keys) for _, keys in chains)
        self._metrics.lookup_hits += sum(int(np.count_nonzero(each.present)) for each in found)
        return found

    async def _ask(self, asked: list[_Asked]) -> list[tuple[Looked, int]]:
        """Take note of what is stored and looks sound; return which cold records are expected after how many ms."""
        answer = await self._source.find([key for _, _, _, key in asked])
        cold: list[tuple[Looked, int]] = []
        for (looked, position, namespace, key), stored in zip(asked, answer, strict=True):
            if isinstance(stored, Stored) and self._is_sound(stored, key, namespace):
                looked.tiers[position] = stored.tier
                looked.stored_bytes += stored.length
            elif isinstance(stored, Cold):
                looked.tiers[position] = Tier.COLD
                looked.stored_bytes += stored.length
                cold.append((looked, stored.ms))
                self._cache.drop(key)
            elif stored is None:
                self._cache.drop(key)
            elif isinstance(stored, Unanswered):
                logger.debug("lookup of %s: %s", key.hex(), stored.reason)
        return cold

    async def prefetch(self, chains: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        """Have storage begin to bring what is cold of each chain, those of a prompt's first chunks first.

        Raises:
            StorageUnavailableError, StorageRefusedError: it was not told.
        """
        side_by_side = zip_longest(*(keys for _, keys in chains))
        keys = [key for chunk in side_by_side for key in chunk if key is not None]
        for first in range(0, len(keys), QUESTION_KEYS_MAX):
            await self._source.prefetch(keys[first : first + QUESTION_KEYS_MAX])

    def expect(self, requests: Sequence[Expected]) -> None:
        """Tell the source what will be fetched soon; of faulty records, nothing."""
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
        """Publish keys that a host will store; withdraw them where ``lasts_ms`` is 0; see :meth:`Source.publish`.

        Args:
            owner: the host.
            keys: to be published.
            lasts_ms: from now on.
            plain: they will be stored as records that do not leave this machine's tiers, where it has some.

        Returns:
            Which engines hear of it.

        Raises:
            StorageUnavailableError, StorageRefusedError: storage has not been told, or the host's share is used up.
        """
        if lasts_ms:
            try:
                told = self._publications.publish(owner, keys, lasts_ms)
            except StorageRefusedError:
                self._metrics.publications_refused += len(keys)
                raise
        else:
            told = self._publications.withdraw(owner, keys)
        if self._source.publishes_here:
            return pb.REACH_ALL
        if plain and self._source.keeps_plain:
            return pb.REACH_DATA_PLANE
        taken = await self._source.publish(told, lasts_ms) if told else True
        return pb.REACH_ALL if taken else pb.REACH_NONE

    def forget_host(self, owner: str) -> None:
        """Withdraw what a host has published that is gone."""
        if keys := self._publications.forget(owner):
            task = asyncio.ensure_future(self._withdraw(keys))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _withdraw(self, keys: Sequence[bytes]) -> None:
        try:
            await self._source.publish(keys, 0)
        except StorageError as error:
            logger.debug("withdrawing: %s", error)  # their time will be up

    async def published(self, chains: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[Flags] | None:
        """Return for each chain which chunks are published; None where storage takes no publications.

        An answer that cannot be had is none of them: whoever asks computes what it could have waited for.
        """
        keys = [key for _, keys in chains for key in keys]
        found: list[Flags] = []
        for first in range(0, len(keys), QUESTION_KEYS_MAX):
            question = keys[first : first + QUESTION_KEYS_MAX]
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
        """Return which keys are pending; of plain records storage does not know."""
        if self._source.publishes_here:
            return self._publications.pending(keys)
        flags = await self._source.published(keys)
        return flags if flags is None or not self._source.keeps_plain else flags | self._publications.pending(keys)

    async def find(self, keys: Sequence[bytes], *, fresh: bool, waiting: bool = True) -> list[tuple[Found, bool]]:
        """Return what is stored under each of up to QUESTION_KEYS_MAX keys, and whether that is only remembered.

        Args:
            keys: of chunks.
            fresh: ask for all, whatever is remembered.
            waiting: wait until what is cold is nearer; otherwise it is Cold.

        Raises:
            StorageUnavailableError, StorageRefusedError: storage did not answer.
        """
        known = {} if fresh else {key: entry[0] for key in keys if (entry := self._cache.get(key)) is not None}
        unknown = [key for key in keys if key not in known]
        try:
            asked = await self._source.find(unknown) if unknown else ()
        except StorageError as error:
            if not known:
                raise
            asked = [Unanswered.of(error)] * len(unknown)  # what is known may be had from somewhere near
        answers = dict(zip(unknown, asked, strict=True))
        if waiting and (cold := [key for key, each in answers.items() if isinstance(each, Cold)]):
            answers |= zip(cold, await self._source.heads(cold), strict=True)
        return [(known[key], True) if key in known else (answers[key], False) for key in keys]

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget remembered heads."""
        for key in keys:
            self._cache.drop(key)

    def is_quarantined(self, namespace: bytes, key: bytes) -> bool:
        """Return whether a key is not to be offered."""
        end = self._quarantine.get((namespace, key))
        if end is None:
            return False
        if end > time.monotonic():
            return True
        del self._quarantine[namespace, key]
        return False

    def condemn(self, namespace: bytes, key: bytes, fault: Fault) -> None:
        """Count a faulty record, log it once, stop offering its key for a while, and delete it if it is corrupt.

        The quarantine holds for askers of this namespace alone: a caller who asks for another's key under a wrong
        namespace or shape gets a mismatch, and harms nobody else's hits.
        """
        self._metrics.integrity_failures[outcome_name(fault.outcome)] += 1
        self._cache.drop(key)
        if self.is_quarantined(namespace, key):
            return
        self._quarantine[namespace, key] = time.monotonic() + self._quarantine_time
        while len(self._quarantine) > self._quarantine_max:
            self._quarantine.popitem(last=False)
        deleting = fault.outcome == pb.OUTCOME_CORRUPT and self._delete_corrupt
        logger.warning(
            "record %s is unusable (%s): %s; treated as a miss for %g s%s",
            key.hex(),
            outcome_name(fault.outcome),
            fault.reason,
            self._quarantine_time,
            " and deleted from storage" if deleting else "",
        )
        if deleting:
            task = asyncio.create_task(self._delete(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def pardon(self, namespace: bytes, key: bytes) -> None:
        """Offer a key again: it was stored anew."""
        self._quarantine.pop((namespace, key), None)
        self._cache.drop(key)

    def available(self, key: bytes) -> None:
        """Note that a key is stored, and so is not pending any more."""
        self._publications.stored(key)

    @property
    def storage(self) -> tuple[str, bool]:
        """The name of storage, for people, and whether it is connected."""
        return self._source.name, self._source.connected

    async def close(self) -> None:
        """Give up what is in progress beside calls."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _is_sound(self, stored: Stored, key: bytes, namespace: bytes) -> bool:
        """Judge what a lookup found, and remember it if it is sound. Unchanged since last time: no need to look."""
        entry = self._cache.get(key)
        if entry is not None and entry[0][:2] == stored[:2] and entry[1].namespace == namespace:
            return True
        judged = inspect_head(stored, key, namespace, self.codecs)
        if isinstance(judged, Fault):
            self.condemn(namespace, key, judged)
            return False
        self._cache.put(key, stored, judged)
        return True

    async def _delete(self, key: bytes) -> None:
        try:
            await self._source.delete(key)
            self._metrics.deleted_records += 1
        except StorageError as error:
            logger.info("corrupt record %s could not be deleted: %s", key.hex(), error)

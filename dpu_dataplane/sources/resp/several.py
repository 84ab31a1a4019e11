"""Several storage servers: each segment has one server, and others while that is unreachable or has a long queue.

:mod:`shadowserve.placement` maps segments to servers: the same map on all data planes with the same addresses and
weights. New records and publications go to the first choice. A lookup asks the first choices of its segments, all at
the same time, and the second choices where a long queue is expected. Then it asks the second choice of a segment if the
first one has a long queue after all, or lacks records after it was away or after a change of the map. It decides by the
answers and loads which one the fetch reads from, and returns that one's answer. If only the busy one has a record, it
is copied to the other one (copies.py).
"""

import asyncio
import functools
import logging
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from dpu_dataplane.config import NODES_MAX, DataPlaneConfig
from dpu_dataplane.jobs import Job, Stop
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.plan import FetchPlan
from dpu_dataplane.sources.found import Cold, Found, Stored
from dpu_dataplane.sources.resp.copies import HotCopies
from dpu_dataplane.sources.resp.links import Node
from dpu_dataplane.sources.resp.server import OneServer
from dpu_dataplane.sources.resp.source import AvoidedNodes, RespSource
from dpu_dataplane.sources.source import Delivered, Encoded, Failure, Resources
from shadowserve import members
from shadowserve.addresses import split_address
from shadowserve.errors import StorageError, StorageRefusedError
from shadowserve.keys import SEGMENT_CHUNKS, segment_of
from shadowserve.native import Origin, Result
from shadowserve.pieces import Flags
from shadowserve.placement import WAIT_MARGIN_US, Choice, Placement, Rates, Waits, partition_of

_CHOSEN_MAX: Final = 65536
"""Segments and keys whose records are read from another server than their first choice; the oldest are forgotten."""
_SECOND_S: Final = 0.1  # longest wait for second choices, after the first ones have answered
_THERE: Final = Stored, Cold
_RETURNED_S: Final = 600.0
"""Seconds for which the second choices of a server that was away are asked too: they have what was stored meanwhile."""

_Answer = TypeVar("_Answer")
_Question = Callable[[OneServer, Sequence[bytes]], Awaitable[_Answer]]

logger = logging.getLogger(__name__)


class _Answered(NamedTuple, Generic[_Answer]):
    """A server's answer for some keys, given by their indexes."""

    address: str
    indexes: Sequence[int]
    answer: _Answer


_Asking = tuple[str, asyncio.Task[list[_Answered[Sequence[Found] | BaseException]]]]
"""A server that is asked for keys, and the task that ends with its answers."""


class _Segment(NamedTuple):
    """Keys of one segment in a request, by their indexes, and the two servers that may have their records."""

    name: bytes
    indexes: Sequence[int]
    first: str
    second: str | None


class SeveralServers(RespSource):
    """The servers of ``storage_nodes``, a list that may change (:mod:`shadowserve.members`), each with its segments."""

    clustered = True

    def __init__(self, config: DataPlaneConfig, metrics: Metrics) -> None:
        """ConfigurationError: the file with the list cannot be used."""
        given = config.storage_nodes
        weights = members.first(given)
        name = config.storage_server_name or members.service_of(given)  # in the certificates of all nodes of a service
        super().__init__(",".join(weights), config.model_copy(update={"storage_server_name": name}), metrics)
        self._follower = members.Follower(
            given, config.storage_nodes_ttl_s, self.set_members, self._count_refused, config.connect_timeout_s
        )
        self._placement = self._before = Placement(weights)  # the map, and the one before the last change
        self._servers = {address: self._server(address) for address in weights}
        self._leaving: set[OneServer] = set()  # removed ones that are not closed yet
        self._tasks: defaultdict[str, set[asyncio.Future[Any]]] = defaultdict(set)  # requests in progress, by address
        self._avoided = AvoidedNodes()
        self._usable_before: Collection[str] = ()
        self._known_choices: dict[int, tuple[str, str | None]] = {}  # by partition, while the usable servers are these
        self._returned: dict[str, float] = {}  # servers that were away, with the end of the time in which that matters
        self._chosen: OrderedDict[bytes, str] = OrderedDict()  # addresses by segment, or by key for exceptions
        self._warming: asyncio.Future[Any] | None = None  # the request that warms a second choice
        self._busy: set[str] = set()  # servers that were avoided for their load
        self._rates = Rates()
        self._record_bytes = 0  # mean of the last lookup that has found some
        self._started = False
        self._copies: HotCopies
        metrics.gauges["storage_nodes_away"] = (
            "Unreachable storage servers; other servers have their segments meanwhile",
            lambda: float(sum(not server.connected for server in self._servers.values())),
        )

    def _server(self, address: str) -> OneServer:
        server = OneServer(self._config, self._metrics, address, meanwhile="other servers have its segments")
        server.asks_load = True
        return server

    def attach(self, resources: Resources) -> None:
        super().attach(resources)
        self._copies = HotCopies(resources, self._receive_part, self._config.command_timeout_s)

    async def start(self) -> None:
        self._started = True
        for server in self._servers.values():
            await server.start()
        self._copies.start()
        await self._follower.start()

    async def close(self) -> None:
        await self._copies.close()
        await super().close()

    async def _disconnect(self) -> None:
        await self._follower.stop()
        for server in [*self._servers.values(), *self._leaving]:
            await server.close()

    async def set_members(self, weights: Mapping[str, float]) -> None:
        """Replace the servers, given by their addresses and weights. Returns when removed ones are closed.

        A map that cannot be used is counted, and the old one stays: an empty one, or one with a weight that is not
        positive.
        """
        if not 0 < len(weights) <= NODES_MAX or not all(0 < weight < math.inf for weight in weights.values()):
            self._count_refused()
            logger.warning("a list of %d storage nodes cannot be used; the old one stays: %s", len(weights), self.name)
            return
        if weights == self._placement.weights:
            return
        new = {address: self._server(address) for address in weights if address not in self._servers}
        removed = [self._servers.pop(address) for address in list(self._servers) if address not in weights]
        self._servers |= new
        self._rates.keep(weights)
        self._leaving.update(removed)
        self._placement, self._before, self._known_choices = Placement(weights), self._placement, {}
        self.name = ",".join(weights)
        logger.info("storage nodes: %s", ", ".join(f"{address} (weight {weights[address]:g})" for address in weights))
        if self._started:
            for server in new.values():
                await server.start()
        for server in removed:
            if tasks := self._tasks.pop(server.name, None):
                await asyncio.wait(tasks, timeout=self._config.command_timeout_s)
            await server.close()
            self._leaving.discard(server)
            for link in self._idle.pop(server.node, ()):
                link.close()

    def _count_refused(self) -> None:
        self._metrics.totals["storage_nodes_refused"] += 1

    @property
    def connected(self) -> bool:
        return any(server.connected for server in self._servers.values())

    def check(self) -> None:
        if all(server.is_away for server in self._servers.values()):
            for server in self._servers.values():
                server.check()

    # ---- Routing

    def nodes(self) -> Sequence[Node]:
        return [server.node for server in self._servers.values()]

    def route(self, keys: Sequence[bytes], *, master: bool) -> list[Node | None]:
        return [self._servers[address].node for address in self._addresses_of(keys, first=master)]

    def _usable(self) -> Collection[str]:
        """Return the servers that are reachable, as far as is known; all of them if none is."""
        here = {address for address, server in self._servers.items() if not server.is_away}
        usable = {address for address in here if self._servers[address].node not in self._avoided}
        now_s = time.monotonic()
        self._returned = {address: end for address, end in self._returned.items() if end > now_s}
        if len(usable) < len(self._servers):
            self._returned |= dict.fromkeys(self._servers.keys() - usable, now_s + _RETURNED_S)
        usable = usable or here or set(self._servers)
        if usable != self._usable_before:
            self._usable_before, self._known_choices = usable, {}
        return usable

    def _choices(self, segment: bytes, usable: Collection[str]) -> tuple[str, str | None]:
        """Return the first and the second choice of a segment among the usable servers.

        After a change of the map, the second choice is the server that was the first one before.
        """
        partition = partition_of(segment)
        if (known := self._known_choices.get(partition)) is not None:
            return known
        ranking, before = self._placement.ranking(partition), self._before.ranking(partition)[0]
        first, *others = islice((address for address in ranking if address in usable), 2)
        moved = before != ranking[0] and before != first and before in usable
        known = self._known_choices[partition] = first, before if moved else others[0] if others else None
        return known

    def _addresses_of(self, keys: Sequence[bytes], *, first: bool) -> list[str]:
        """Return the server of each key: its first choice, or the one that its records are read from."""
        usable = self._usable()
        by_segment: dict[bytes, str] = {}
        by_key: dict[bytes, str] = {}
        for key in dict.fromkeys(keys):
            segment = segment_of(key)
            chosen = None if first else self._chosen.get(key) or self._chosen.get(segment)
            if chosen is None or chosen not in usable:
                if segment not in by_segment:
                    by_segment[segment] = self._choices(segment, usable)[0]
                chosen = by_segment[segment]
            by_key[key] = chosen
        return [by_key[key] for key in keys]

    def _read_from(self, name: bytes, address: str, first: str) -> None:
        """Note the server that a segment, or a key of it, is read from, unless it is ``first``."""
        self._chosen.pop(name, None)
        if address != first:
            self._chosen[name] = address
            while len(self._chosen) > _CHOSEN_MAX:
                self._chosen.popitem(last=False)

    async def recover(self, node: Node | None) -> None:
        if node is not None:
            self.note_failure(node)

    def note_failure(self, node: Node) -> None:
        """Avoid a server until its control connection knows whether it is down."""
        self._avoided.add(node)

    def note_rates(self, bytes_per_us: Mapping[Node, float]) -> None:
        self._rates.note({str(node): rate for node, rate in bytes_per_us.items()}, time.monotonic())

    # ---- Bytes

    async def deliver(self, job: Job, plan: FetchPlan) -> Delivered:
        far = np.flatnonzero(plan.pieces["origin"] == Origin.SERVER).tolist()
        keys = list({plan.keys[piece] for piece in far})
        usable = self._usable()
        addresses = self._addresses_of(keys, first=False)
        for key, address in zip(keys, addresses, strict=True):
            best = self._placement.ranking(partition_of(key))[0]
            choice = "first" if address == best else "second" if best in usable else "away"
            self._metrics.storage_nodes_reads[choice] += 1
        return await self._deliver_unless_lost(job, plan, {address: self._servers[address] for address in addresses})

    async def _deliver_unless_lost(self, job: Job, plan: FetchPlan, servers: Mapping[str, OneServer]) -> Delivered:
        """Deliver a plan; fail, such that a retry may help, when a server is lost, because it may never answer."""
        part, lost = job.part(), list[Node]()

        def lose(node: Node) -> None:
            lost.append(node)
            self.note_failure(node)
            part.cancel()

        calls = {server: functools.partial(lose, server.node) for server in servers.values()}
        ended = asyncio.get_running_loop().create_future()
        for address, server in servers.items():
            server.on_lost.add(calls[server])
            self._tasks[address].add(ended)
        try:
            with job.interruptible(part.cancel):
                done = await super().deliver(part, plan)
        except Stop as stop:
            if not lost or job.cancelled:
                raise
            done = Delivered(np.full(len(plan.pieces), Result.SKIPPED, np.uint32), stop=stop)
        finally:
            ended.set_result(None)
            for address, server in servers.items():
                server.on_lost.discard(calls[server])
                self._tasks[address].discard(ended)
        return done if not lost or job.cancelled else self._without_lost(done, lost)

    def _without_lost(self, done: Delivered, lost: Sequence[Node]) -> Delivered:
        """Return the result of a plan that was ended because servers were lost, as failures of a connection."""
        failed = [piece for piece, each in done.failures.items() if each.result is Result.CANCELLED]
        for piece in failed or np.flatnonzero(done.results != Result.OK)[:1].tolist():
            done.results[piece] = Result.DISCONNECTED
            done.failures[piece] = Failure(
                Result.DISCONNECTED,
                reply=f"{lost[0]}: the control connection was lost",
                recover=functools.partial(self.recover, lost[0]),
            )
        done.stop = None
        return done

    async def _receive_part(self, job: Job, server: OneServer, key: bytes, first: int, memory: memoryview) -> Result:
        result, _ = await self._receive_from(job, server.node, key, first, memory)
        return result

    async def put(self, job: Job, key: bytes, record: Encoded) -> tuple[Result, str]:
        self._writing.keep(self.nodes())
        return await super().put(job, key, record)

    # ---- Requests

    async def find(self, keys: Sequence[bytes]) -> Sequence[Found]:
        segments = self._segments(keys)
        found, first_of, seconds = await self._ask_choices(keys, segments)
        others, other_of = _by_key(keys, [each for each in seconds if isinstance(each.answer, Sequence)])  # type: ignore[misc]
        if not other_of and not self._chosen:
            return found
        waits = self._waits({address: server.load_us for address, server in self._servers.items()})
        for segment in segments:
            index = segment.indexes[0]
            first, second = first_of[index], other_of.get(index)
            if second is not None and second != first:
                self._decide(keys, segment._replace(first=first, second=second), found, others, waits)
                continue
            waits.choose(Choice(first), None, _bytes_of([found[at] for at in segment.indexes]))
            if self._chosen:
                for name in (segment.name, *[keys[at] for at in segment.indexes]):
                    self._chosen.pop(name, None)
        return found

    async def _ask_choices(
        self, keys: Sequence[bytes], segments: Sequence[_Segment]
    ) -> tuple[list[Found], dict[int, str], list[_Answered[Sequence[Found] | BaseException]]]:
        """Ask the first choices of all segments, and the second ones that may be read from.

        Returns:
            The first choices' answers for each key, their addresses by the indexes of keys, and the second ones'.
        """
        size, loads = self._record_bytes, self._loads()
        expected = self._also(segments, [Cold(size, 0)] * len(keys), size, loads)  # in the same round trip
        firsts = _by_first(segments)
        asking = self._ask_each(keys, {address: some for address, some in expected.items() if address not in firsts})
        try:
            both = {address: [*some, *expected.get(address, ())] for address, some in firsts.items()}  # in one request
            answers, seconds = _split(await self._ask(keys, _find, by_server=both), both, firsts)
            found, first_of = _by_key(keys, answers)
            self._record_bytes = _bytes_of(found) // max(1, len(keys)) or self._record_bytes
            # By the loads that the first choices have just reported: of many nodes, a data plane knows few others.
            also, now = expected, self._loads()
            if now != loads or not size or self._may_have_moved:
                also = self._also(segments, found, size or self._record_bytes, now)
            await self._ask_seconds(keys, expected, also, asking)
        finally:
            for _, task in asking:
                task.cancel()
        seconds += [each for _, task in asking if task.done() and not task.cancelled() for each in task.result()]
        return found, first_of, seconds

    async def _ask_seconds(
        self,
        keys: Sequence[bytes],
        expected: Mapping[str, Sequence[int]],
        also: Mapping[str, Sequence[int]],
        asking: list[_Asking],
    ) -> None:
        """Ask those second choices in ``also`` that are not ``expected``, and wait a moment for all in ``also``."""
        asked = {address: frozenset(some) for address, some in expected.items()}
        awaited = [task for address, task in asking if not asked[address].isdisjoint(also.get(address, ()))]
        left = {address: [at for at in some if at not in asked.get(address, ())] for address, some in also.items()}
        more = self._ask_each(keys, {address: some for address, some in left.items() if some})
        asking += more
        if awaited or more:
            await asyncio.wait([*awaited, *(task for _, task in more)], timeout=_SECOND_S)

    def _ask_each(self, keys: Sequence[bytes], by_server: Mapping[str, Sequence[int]]) -> list[_Asking]:
        """Look keys up, with a task for each server: a slow one must not delay the answers of the others."""
        return [
            (address, asyncio.ensure_future(self._ask_servers(keys, {address: some}, _find)))
            for address, some in by_server.items()
        ]

    def _segments(self, keys: Sequence[bytes]) -> list[_Segment]:
        usable = self._usable()
        by_name: dict[bytes, list[int]] = {}
        for index, key in enumerate(keys):
            by_name.setdefault(segment_of(key), []).append(index)
        return [_Segment(name, indexes, *self._choices(name, usable)) for name, indexes in by_name.items()]

    def _waits(self, loads_us: Mapping[str, int | None]) -> Waits:
        known = {address: load_us for address, load_us in loads_us.items() if load_us is not None}
        return Waits(known, self._rates.us_per_byte, self._rates.slow(time.monotonic()))

    def _loads(self) -> dict[str, int]:
        """Return the microseconds that each server has reported, 0 if none a moment ago."""
        return {address: server.load_us or 0 for address, server in self._servers.items() if server.takes_load}

    @property
    def _may_have_moved(self) -> bool:
        """The records of a segment may be at the server that was its first choice before."""
        return self._before is not self._placement or bool(self._returned)

    def _also(
        self, segments: Sequence[_Segment], found: Sequence[Found], size: int, loads: Mapping[str, int]
    ) -> dict[str, list[int]]:
        """Return the second choices that a lookup asks too, with the indexes of keys: they may be read from.

        ``found`` has the answers of the first choices, ``loads`` each server's in microseconds. ``size`` is expected of
        all records: with their own sizes, idle nodes would be asked in a second round trip.
        """
        waits = self._waits(loads)
        sizes = [size if _is_there(each) else 0 for each in found]
        all_bytes = sum(sizes)
        longest_us = max(waits.wait_us(Choice(address), all_bytes) for address in self._servers)
        longest_us += waits.us_of(all_bytes)
        if not self._may_have_moved and longest_us <= WAIT_MARGIN_US:
            return {}
        also: dict[str, list[int]] = {}
        for name, indexes, first, second in segments:
            if second is None:
                continue
            segment_bytes = sum([sizes[index] for index in indexes])
            is_asked = waits.choose(Choice(first), Choice(second), segment_bytes) == second
            if not is_asked and self._may_have_moved and not all(_is_there(found[index]) for index in indexes):
                is_asked = second == self._before.ranking(partition_of(name))[0] or first in self._returned
            if is_asked:
                also.setdefault(second, []).extend(indexes)
        return also

    def _decide(
        self, keys: Sequence[bytes], segment: _Segment, found: list[Found], others: Sequence[Found], waits: Waits
    ) -> None:
        """Decide which server a segment is read from; ``found`` has the first choice's answers, and receives its."""
        name, indexes, first, second = segment
        assert second is not None
        here, there = [found[index] for index in indexes], [others[index] for index in indexes]
        size = _bytes_of(map(_better, here, there))
        own, other = Choice(first, _cold_us(here)), Choice(second, _cold_us(there))
        chosen = waits.choose(own, other if any(map(_is_there, there)) else None, size)
        if chosen == second and first not in self._busy:
            self._busy.add(first)
            logger.info(
                "storage node %s is avoided while it is busy (%.0f ms; %s: %.0f ms): see storage_nodes_reads_total",
                first,
                waits.wait_us(own, size) / 1e3,
                second,
                waits.wait_us(other, size) / 1e3,
            )
        self._read_from(name, chosen, first)
        for index in indexes:
            address, lacking = first, second
            if _is_there(others[index]) and (chosen == second or not _is_there(found[index])):
                address, lacking = second, first
            answers = {first: found[index], second: others[index]}
            found[index] = answers[address]
            self._read_from(keys[index], address, chosen)
            if answers[lacking] is None:
                self._copy(keys[index], found[index], address, lacking)
        if chosen == first and any(isinstance(each, Cold) for each in there):
            self._warm(keys, indexes, first, second)

    def _copy(self, key: bytes, found: Found, address: str, lacking: str) -> None:
        """Copy a record to a server that lacks it, if the one that has it is busy by comparison."""
        if isinstance(found, Stored) and self._is_relief(lacking, address):
            self._copies.add(key, found.length, self._servers[address], self._servers[lacking])

    def _warm(self, keys: Sequence[bytes], indexes: Sequence[int], busy: str, other: str) -> None:
        """Let a server read cold records from the bucket, so that it can relieve a busy one; one segment at a time."""
        if self._is_relief(other, busy) and (self._warming is None or self._warming.done()):
            asking = self._ask_servers(keys, {other: indexes}, lambda server, mine: server.prefetch(mine))
            self._warming = asyncio.ensure_future(asking)

    def _is_relief(self, address: str, busy: str) -> bool:
        """Return True if a server's wait is clearly shorter than that of a busy one, by their loads and rates."""
        servers = [self._servers.get(each) for each in (address, busy)]
        waits = self._waits({each.name: each.load_us for each in servers if each is not None})
        size = SEGMENT_CHUNKS * self._record_bytes
        return None not in servers and waits.prefers(Choice(address), Choice(busy), size)

    async def find_stored(self, keys: Sequence[bytes]) -> Sequence[Found]:
        """Ask the first choices: they are to have new records."""
        return _by_key(keys, await self._ask(keys, _find))[0]

    async def publish(self, keys: Sequence[bytes], lasts_ms: int) -> bool:
        """Publish keys, each at its first choice; StorageRefusedError if a server refuses, and none takes them."""
        refusals, taken = await self._offer(keys, lambda server, mine: server.publish(mine, lasts_ms))
        if refusals and not taken:
            raise refusals[0]
        return taken

    async def pin(self, keys: Sequence[bytes], seconds: int) -> bool:
        """Pin records at their first choices, and where they are read from instead: that may fail, or be slow."""

        def ask(server: OneServer, mine: Sequence[bytes]) -> Awaitable[bool]:
            return server.pin(mine, seconds)

        firsts, elsewhere = self._addresses_of(keys, first=True), dict[str, list[int]]()
        for index, address in enumerate(self._addresses_of(keys, first=False)):
            if address != firsts[index]:
                elsewhere.setdefault(address, []).append(index)
        asking = asyncio.ensure_future(self._ask_servers(keys, elsewhere, ask))
        try:
            refusals, taken = await self._offer(keys, ask)
            await asyncio.wait((asking,), timeout=_SECOND_S)
        finally:
            asking.cancel()
        if refusals:
            raise refusals[0]
        return taken

    async def _offer(self, keys: Sequence[bytes], question: _Question[bool]) -> tuple[list[StorageRefusedError], bool]:
        """Ask first choices to take keys; return the refusals, and whether some server took its keys."""
        refusals: list[StorageRefusedError] = []

        async def ask(server: OneServer, mine: Sequence[bytes]) -> bool:
            try:
                return await question(server, mine)
            except StorageRefusedError as error:  # another server would not be asked for these keys
                refusals.append(error)
                return False

        return refusals, any([each.answer for each in await self._ask(keys, ask)])

    async def published(self, keys: Sequence[bytes]) -> Flags | None:
        answers = await self._ask(keys, lambda server, mine: server.published(mine))
        if all(each.answer is None for each in answers):
            return None
        published = np.zeros(len(keys), np.bool_)
        for _, some, flags in answers:
            if flags is not None:
                published[some] = flags
        return published

    async def find_warm(self, keys: Sequence[bytes], *, headers: bool) -> Sequence[Found]:
        answers = await self._ask(keys, lambda server, mine: server.find_warm(mine, headers=headers), first=False)
        return _by_key(keys, answers)[0]

    async def prefetch(self, keys: Sequence[bytes]) -> None:
        await self._ask(keys, lambda server, mine: server.prefetch(mine), first=False)

    async def delete(self, key: bytes) -> None:
        """Delete a record at its first choice, and at others that may have it; these may fail, or be slow."""

        async def ask(server: OneServer, mine: Sequence[bytes]) -> None:
            await server.delete(mine[0])

        [segment] = self._segments([key])
        others = {segment.second, *self._addresses_of([key], first=False)} - {None, segment.first}
        asking = asyncio.ensure_future(self._ask_servers([key], {other: [0] for other in others if other}, ask))
        try:
            await self._ask([key], ask, final=StorageRefusedError)
            await asyncio.wait((asking,), timeout=_SECOND_S)
        finally:
            asking.cancel()

    async def _ask(
        self,
        keys: Sequence[bytes],
        question: _Question[_Answer],
        *,
        first: bool = True,
        by_server: Mapping[str, Sequence[int]] | None = None,
        final: type[StorageError] | tuple[()] = (),
    ) -> list[_Answered[_Answer]]:
        """Ask each key's server, the first choice or the one to read from, and the next one if it fails.

        ``by_server`` has the indexes of the keys by server, if it is known already. An error that is ``final`` is
        raised, and the server counts as reachable.
        """
        answers: list[_Answered[_Answer]] = []
        left = list(range(len(keys)))
        for last in [False] * (len(self._servers) - 1) + [True]:
            if by_server is None:
                grouped: dict[str, list[int]] = {}
                addresses = self._addresses_of([keys[index] for index in left], first=first)
                for index, address in zip(left, addresses, strict=True):
                    grouped.setdefault(address, []).append(index)
                by_server = grouped
            left = []
            results = await self._ask_servers(keys, by_server, question)
            by_server = None
            for address, some, result in results:
                if not isinstance(result, BaseException):
                    answers.append(_Answered(address, some, result))
                elif last or not isinstance(result, StorageError) or isinstance(result, final):
                    raise result
                else:
                    self.note_failure(Node(*split_address(address)))
                    left += some
            if not left:
                break
        return answers

    async def _ask_servers(
        self, keys: Sequence[bytes], by_server: Mapping[str, Sequence[int]], question: _Question[_Answer]
    ) -> list[_Answered[_Answer | BaseException]]:
        by_server = {address: some for address, some in by_server.items() if address in self._servers}
        tasks = []
        for address, some in by_server.items():
            task = asyncio.ensure_future(question(self._servers[address], [keys[index] for index in some]))
            running = self._tasks[address]
            running.add(task)
            task.add_done_callback(running.discard)
            tasks.append(task)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [_Answered(*each, result) for each, result in zip(by_server.items(), results, strict=True)]


async def _find(server: OneServer, keys: Sequence[bytes]) -> Sequence[Found]:
    return await server.find(keys)


def _by_first(segments: Sequence[_Segment]) -> dict[str, list[int]]:
    """Return the indexes of keys by the first choices of their segments."""
    by_server: dict[str, list[int]] = {}
    for each in segments:
        by_server.setdefault(each.first, []).extend(each.indexes)
    return by_server


def _split(
    answers: Sequence[_Answered[Sequence[Found]]],
    both: Mapping[str, Sequence[int]],
    firsts: Mapping[str, Sequence[int]],
) -> tuple[list[_Answered[Sequence[Found]]], list[_Answered[Sequence[Found] | BaseException]]]:
    """Divide answers about ``both``: those about ``firsts``, which come first in each request, and the others."""
    first, second = list[_Answered[Sequence[Found]]](), list[_Answered[Sequence[Found] | BaseException]]()
    for each in answers:
        address, indexes, answer = each
        count = len(firsts[address]) if indexes is both.get(address) else len(indexes)
        first.append(_Answered(address, indexes[:count], answer[:count]))
        second.append(_Answered(address, indexes[count:], answer[count:]))
    return first, second


def _by_key(keys: Sequence[bytes], answers: Sequence[_Answered[Sequence[Found]]]) -> tuple[list[Found], dict[int, str]]:
    """Return the answer for each key, and the servers that have answered, by the indexes of keys."""
    found: list[Found] = [None] * len(keys)
    by: dict[int, str] = {}
    for address, some, answer in answers:
        for index, each in zip(some, answer, strict=True):
            found[index], by[index] = each, address
    return found, by


def _is_there(found: Found) -> bool:
    return isinstance(found, _THERE)


def _bytes_of(found: Iterable[Found]) -> int:
    return sum([each.length for each in found if isinstance(each, _THERE)])


def _better(found: Found, other: Found) -> Found:
    return other if _is_there(other) and not _is_there(found) else found


def _cold_us(found: Sequence[Found]) -> float:
    """Return the microseconds until the last cold record is expected."""
    return max((1e3 * each.ms for each in found if isinstance(each, Cold)), default=0.0)

"""Simulation of a fleet, event by event: a request has looked its prompt up, a node has sent, the bucket has answered.

A node shares its link equally among its transfers. The product's own objects decide: ``Placement`` where a segment
is and which node is asked, ``MemoryCache`` what stays in memory. A node reads a segment from the bucket once, however
many ask for it.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from dpu_dataplane.config import DataPlaneConfig
from host_control.config import HostConfig
from shadowserve.keys import DEFAULT_CHUNK_TOKENS, SEGMENT_CHUNKS
from shadowserve.placement import Choice, Placement, Waits
from shadowserve.pool.arena import Arenas, Buffer
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.memory_cache import MemoryCache
from shadowserve_tools.simulate.fleet_load import EVERYWHERE, Given, Prompt, Segment, mixed

_S3, _PLANE = S3Config.model_fields, DataPlaneConfig.model_fields
RANGE_BYTES: Final = 8 << 20
"""Bytes of a read from the bucket."""
_BUCKET_TIMEOUT_S: Final[float] = _S3["timeout_s"].default
_SEEN_BY_OTHERS_S: Final[float] = _S3["gather_s"].default + _S3["index_ttl_s"].default
_READS_AT_ONCE: Final[int] = _S3["reads_at_once"].default
_FETCH_TIMEOUT_S: Final[float] = HostConfig.model_fields["fetch_timeout_s"].default
DETECTED_S: Final[float] = _PLANE["command_timeout_s"].default
"""Seconds until a data plane abandons a node that does not answer."""
LOAD_S: Final = 2.0
"""Age of a reported load up to which a data plane uses it."""
SOURCES: Final = ("engine", "memory", "device", "bucket", "miss")


@dataclass
class Counts:
    """Events and bytes of a run.

    Attributes:
        asked: Bytes that nodes were asked for; each is sent, or given up with a node or a deadline.
        by_source: Bytes from an engine's cache, a node's memory or devices, the bucket; those of a miss are computed.
            These, ``gets`` and ``stored_bytes`` are of the counted time only.
        late: Requests that ran out of time and computed the rest.
    """

    asked: float = 0.0
    sent: float = 0.0
    given_up: float = 0.0
    by_source: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0.0))
    requests: int = 0
    ended: int = 0
    late: int = 0
    first_token_s: list[float] = field(default_factory=list)
    gets: int = 0
    throttled: int = 0
    stored_bytes: float = 0.0


class _Engine:
    """An engine and its data plane: its prefix cache, the loads that it knows, and when it is free again."""

    __slots__ = ("cache", "computes_until_s", "loads", "met", "receives_until_s", "warms_until_s")

    def __init__(self) -> None:
        self.cache: dict[int, int] = {}  # chunks of each segment in the engine's own memory, the next to go first
        self.met: set[int] = set()  # segments whose place is no more that before the run
        self.loads: dict[_Node, tuple[float, float]] = {}  # microseconds, and when they were reported
        self.receives_until_s = self.computes_until_s = self.warms_until_s = 0.0


class _Request:
    """A request on its way: the number of its open transfers, and the chunks that are to be computed."""

    __slots__ = ("begun_s", "engine", "jobs", "missing", "new", "open", "size")

    def __init__(self, engine: int, begun_s: float, new: list[Segment]) -> None:
        self.engine, self.begun_s, self.new = engine, begun_s, new
        self.jobs: list[_Job] = []
        self.open = self.missing = 0
        self.size = 0.0


class _Job:
    """A transfer of a segment: ``live`` until it ends, ``sending`` while it is on the link, up to the work ``end``.

    ``counted``: its bytes that the counts have under its source.
    """

    __slots__ = ("counted", "end", "live", "node", "request", "segment", "sending", "size", "source")

    def __init__(self, request: _Request, node: "_Node", segment: Segment, size: float, source: str) -> None:
        self.request, self.node, self.segment, self.size, self.source = request, node, segment, size, source
        self.counted = 0.0
        self.live, self.sending = True, False
        self.end = 0.0


class _Copy:
    """A segment in memory: what ``MemoryCache`` uses of a buffer."""

    __slots__ = ("hits", "size", "users")

    def __init__(self, size: float) -> None:
        self.size, self.users, self.hits = size, 1, 0


class _Room:
    """Memory of a node: what ``MemoryCache`` uses of arenas."""

    def __init__(self, size: float) -> None:
        self.left = size

    def release(self, copy: _Copy) -> None:
        self.left += copy.size

    detach = release


class _Node:
    """A node: its link, which all transfers share equally, its memory and devices, and its reads from the bucket."""

    def __init__(self, name: str, rate: float, memory: float) -> None:
        self.name, self.rate, self.memory = name, rate, memory
        self.up = self.known_up = True
        self.restarts = 0
        self.on_device: set[int] = set()
        self.met: set[int] = set()  # segments whose place is no more that before the run
        self.jobs: dict[_Job, None] = {}
        self.sent = 0.0
        self.forget()

    def forget(self) -> None:
        """Begin with empty memory."""
        self.room = _Room(self.memory)
        self.cache = MemoryCache(cast(Arenas, self.room))
        self.filling: dict[int, list[_Job]] = {}
        self.slots = [0.0] * _READS_AT_ONCE
        self.device_free_s = 0.0
        # The link: each transfer has received the work ``work`` since it began; it ends when that reaches its ``end``.
        self.work = self.since_s = self.queued = 0.0
        self.active = self.version = 0
        self.ends: list[tuple[float, int, _Job]] = []

    def keep(self, ident: int, size: float, *, placed: bool = False) -> None:
        """Keep a segment in memory."""
        if self.cache.peek(ident) is None and self._has_room(size):
            self.room.left -= size
            self.cache.add(ident, cast(Buffer, _Copy(size)), placed=placed)

    def _has_room(self, size: float) -> bool:
        while self.room.left < size:
            if not self.cache.make_room():
                return False
        return True

    def pass_time(self, now_s: float) -> None:
        if self.active:
            moved = (now_s - self.since_s) * self.rate
            self.work += moved / self.active
            self.queued -= moved
            self.sent += moved
        self.since_s = now_s

    def next_end_s(self) -> float | None:
        while self.ends and not self.ends[0][2].live:
            heapq.heappop(self.ends)
        if not self.ends:
            return None
        return self.since_s + max(0.0, self.ends[0][0] - self.work) * self.active / self.rate


class Fleet:
    """A run. Engines send requests; see the module.

    Attributes:
        lasting: Requests for which memory, devices and the bucket remember a segment that is not asked for again.
    """

    def __init__(self, its: Given, nodes: Mapping[str, float], engines: int, lasting: Mapping[str, float]) -> None:
        self.its, self.lasting = its, lasting
        self.chunk = its.chunk_mb * 1e6
        rate = its.node_gbit_per_s * its.tcp_share * 1e9 / 8
        self.nodes = {name: _Node(name, rate * weight, its.memory_gb * 1e9) for name, weight in nodes.items()}
        self.placement = Placement(nodes)
        self.engine_rate = its.engine_gbit_per_s * its.tcp_share * 1e9 / 8
        self.engines = [_Engine() for _ in range(engines)]
        self.now_s, self.counts = 0.0, Counts()
        self.counting_from_s, self.counting_to_s = 0.0, math.inf
        self.ended: Callable[[int], None] = lambda engine: None  # called after each request
        self.watched = ""  # node whose segments' transfers are noted: their begin and time, infinite for abandoned ones
        self.transfers: list[tuple[float, float]] = []
        self._stored_at_s: dict[int, float] = {}  # segments that were stored in the run
        self._next_get_s = 0.0
        self._choices: dict[int, tuple[_Node, _Node | None]] = {}
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._deadlines: deque[tuple[float, _Request]] = deque()

    # ---- Time

    def at(self, time_s: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), what, arguments))

    def run(self, until_s: float = math.inf) -> None:
        """Process all events up to a time."""
        events, pop = self._events, heapq.heappop
        while events and events[0][0] <= until_s:
            self.now_s, _, what, arguments = pop(events)
            what(*arguments)
            while self._deadlines and self._deadlines[0][0] <= self.now_s:
                self._give_up(self._deadlines.popleft()[1])

    def sent(self) -> dict[str, float]:
        """Return the bytes that each node has sent."""
        for node in self.nodes.values():
            node.pass_time(self.now_s)
        return {name: node.sent for name, node in self.nodes.items()}

    # ---- Requests

    def ask(self, engine: int, prompt: Prompt) -> None:
        """An engine has a request now: look its prompt up."""
        request = _Request(engine, self.now_s, prompt.new)
        self.counts.requests += 1
        self._deadlines.append((self.now_s + _FETCH_TIMEOUT_S, request))
        self.at(self.now_s + self.its.lookup_ms / 1e3, self._fetch, request, prompt)

    def _fetch(self, request: _Request, prompt: Prompt) -> None:
        """Choose a node for each segment and begin the transfers, up to the first missing segment."""
        engine, segments = self.engines[request.engine], self._uncached(request, prompt.segments)
        pairs = [self._choice(segment.partition) for segment in segments]
        sizes = [segment.chunks * self.chunk for segment in segments]
        asked = self._ask_loads(engine, pairs, sizes)
        waits = self._waits(engine)
        for number, (segment, (first, second), size) in enumerate(zip(segments, pairs, sizes, strict=True)):
            found = self._found(first, segment)
            other = self._found(second, segment) if second in asked and second is not None else None
            one, two = (
                None if source is None or node is None else Choice(node.name, 1e6 * self._cold_s(source, node))
                for source, node in ((found, first), (other, second))
            )
            left = sum(each.chunks for each in segments[number:])
            soonest_us = min((each.extra_us for each in (one, two) if each), default=math.inf)
            # Computing the rest is faster than waiting for the bucket, or there is nothing to wait for.
            if soonest_us > 1e6 * left * DEFAULT_CHUNK_TOKENS / self.its.prefill_tokens_per_s:
                self._count("miss", left * self.chunk)
                request.missing += left
                request.new = [*segments[number:], *request.new]
                break
            # As in the data plane: the first choice counts by its load, also if only the second one has the segment.
            chosen = waits.choose(one or Choice(first.name), two, round(size))
            if chosen == first.name and not one:
                chosen = cast(_Node, second).name
            if second and chosen == first.name and other == "bucket":
                self._warm(engine, first, second, segment, size)
            self._begin(request, self.nodes[chosen], segment, size)
        request.missing += sum(each.chunks for each in prompt.new)
        self._count("miss", sum(each.chunks for each in prompt.new) * self.chunk)
        self._compute_if_placed(request)

    def _uncached(self, request: _Request, segments: list[Segment]) -> list[Segment]:
        """Return the segments after those that the engine still has from its own last requests."""
        engine, room = self.engines[request.engine], int(self.its.engine_gb * 1e3 / self.its.raw_mb / SEGMENT_CHUNKS)
        if not room:
            return segments
        cache, remembers = engine.cache, room / len(segments)  # requests
        for each in segments:
            if each.ident not in engine.met:
                engine.met.add(each.ident)
                if mixed(each.ident ^ request.engine) / 2**64 < -math.expm1(-each.popularity * remembers):
                    cache[each.ident] = each.chunks
        leading = len(list(itertools.takewhile(lambda each: cache.get(each.ident, 0) >= each.chunks, segments)))
        self._count("engine", sum(each.chunks for each in segments[:leading]) * self.chunk)
        for each in reversed(segments):  # an engine frees the end of a prompt before its beginning
            cache.pop(each.ident, None)
            cache[each.ident] = each.chunks
        while len(cache) > room:
            del cache[next(iter(cache))]
        return segments[leading:]

    def _waits(self, engine: _Engine, unknown_us: float | None = None) -> Waits:
        """Return the expected waits at all nodes, by the loads that were reported in the last seconds."""
        since_s = self.now_s - LOAD_S
        loads = {node.name: load_us for node, (load_us, at_s) in engine.loads.items() if at_s > since_s}
        if unknown_us is not None:
            loads = dict.fromkeys(self.nodes, unknown_us) | loads
        return Waits(loads, 8e6 / (self.its.node_gbit_per_s * self.its.tcp_share * 1e9))

    def _ask_loads(
        self, engine: _Engine, pairs: Sequence[tuple[_Node, _Node | None]], sizes: Sequence[float]
    ) -> set[_Node]:
        """Ask the first choices; then those second ones that may be read from by the loads that these have reported."""
        asked = {first for first, _ in pairs}
        self._learn_loads(engine, asked)
        waits = self._waits(engine, 0.0)
        seconds = {
            second
            for (first, second), size in zip(pairs, sizes, strict=True)
            if second and waits.choose(Choice(first.name), Choice(second.name), round(size)) == second.name
        }
        self._learn_loads(engine, seconds)
        return asked | seconds

    def _learn_loads(self, engine: _Engine, nodes: Iterable[_Node]) -> None:
        for node in nodes:
            if node.up:
                node.pass_time(self.now_s)
                engine.loads[node] = 1e6 * node.queued / node.rate, self.now_s

    def _warm(self, engine: _Engine, busy: _Node, other: _Node, segment: Segment, size: float) -> None:
        """Let a node read a segment from the bucket, so that it can relieve a busy one; one segment at a time."""
        if self.now_s < engine.warms_until_s or not other.up or segment.ident in other.filling:
            return
        if self._waits(engine).prefers(Choice(other.name), Choice(busy.name)):
            engine.warms_until_s = self.now_s + self._cold_s("bucket", other)
            other.met.add(segment.ident)
            other.filling[segment.ident] = []
            self._read_bucket(other, segment.ident, size)

    def _choice(self, partition: int) -> tuple[_Node, _Node | None]:
        found = self._choices.get(partition)
        if found is None:
            ranking = [self.nodes[name] for name in self.placement.ranking(partition)]
            first, *others = [node for node in ranking if node.known_up] or ranking
            found = self._choices[partition] = first, others[0] if others else None
        return found

    def _found(self, node: _Node, segment: Segment) -> str | None:
        """Return from where a node has a segment."""
        ident, popularity = segment.ident, segment.popularity
        if not node.known_up:
            return None
        if node.cache.peek(ident) is not None:
            return "memory"
        if ident in node.filling:
            return "bucket"
        if ident in node.on_device:
            return "device"
        drawn = mixed(~ident) / 2**64
        if ident not in node.met and (popularity == EVERYWHERE or self._is_home(node, segment)):
            if not node.restarts and drawn < self._remembered("memory", popularity):
                return "memory"
            if drawn < self._remembered("device", popularity):
                return "device"
        stored_s = self._stored_at_s.get(ident)
        if stored_s is None:
            in_bucket = drawn < self._remembered("bucket", popularity)
        else:
            in_bucket = self.now_s > stored_s + _SEEN_BY_OTHERS_S
        return "bucket" if in_bucket else None

    def _is_home(self, node: _Node, segment: Segment) -> bool:
        return self.placement.ranking(segment.partition)[0] == node.name

    def _remembered(self, tier: str, popularity: float) -> float:
        lasting = self.lasting[tier]
        return -math.expm1(-popularity * lasting) if lasting else 0.0

    def _cold_s(self, source: str, node: _Node) -> float:
        """Return the time until a segment can be sent, as the node expects it."""
        if source == "memory":
            return 0.0
        if source == "device":
            return max(0.0, node.device_free_s - self.now_s)
        begin_s = max(self.now_s, node.slots[0], self._next_get_s)
        return begin_s - self.now_s + self.its.bucket_latency_ms / 1e3 + RANGE_BYTES / (self.its.bucket_mb_per_s * 1e6)

    def _begin(self, request: _Request, node: _Node, segment: Segment, size: float) -> None:
        """Begin a segment's transfer."""
        source = self._found(node, segment)
        if source is None:  # a retry
            request.missing += segment.chunks
            self._count("miss", size)
            return
        job = _Job(request, node, segment, size, source)
        request.jobs.append(job)
        request.open += 1
        node.jobs[job] = None
        self.counts.asked += size
        job.counted = self._count(source, size)
        if not node.up:
            return  # until the data plane gives the node up
        node.met.add(segment.ident)
        if source == "memory":
            if node.cache.get(segment.ident) is None:
                node.keep(segment.ident, SEGMENT_CHUNKS * self.chunk, placed=True)
            self._send(job)
        elif source == "device":
            node.device_free_s = max(node.device_free_s, self.now_s) + size / (self.its.device_gb_per_s * 1e9)
            node.on_device.add(segment.ident)
            self.at(node.device_free_s, self._loaded, job, node.restarts)
        elif (waiting := node.filling.get(segment.ident)) is not None:
            waiting.append(job)
        else:
            node.filling[segment.ident] = [job]
            self._read_bucket(node, segment.ident, size)

    @property
    def _counting(self) -> bool:
        return self.counting_from_s <= self.now_s <= self.counting_to_s

    def _count(self, source: str, size: float) -> float:
        """Count bytes of a source; return those that are counted."""
        counted = size if self._counting else 0.0
        self.counts.by_source[source] += counted
        return counted

    def _loaded(self, job: _Job, restarts: int) -> None:
        if job.node.restarts == restarts and job.node.up:
            job.node.keep(job.segment.ident, SEGMENT_CHUNKS * self.chunk)
            if job.live:
                self._send(job)

    def _read_bucket(self, node: _Node, ident: int, size: float) -> None:
        """Read a segment in ranges; the bucket limits the requests of all nodes together."""
        if max(self._next_get_s, node.slots[0]) > self.now_s + _BUCKET_TIMEOUT_S:
            self.counts.throttled += 1
            self.at(self.now_s + _BUCKET_TIMEOUT_S, self._filled, node, ident, node.restarts, False)
            return
        ended_s, left = self.now_s, size
        while left > 0:
            part = min(left, RANGE_BYTES)
            left -= part
            begin_s = max(self.now_s, self._next_get_s, node.slots[0])
            self._next_get_s = max(self.now_s, self._next_get_s) + 1 / self.its.bucket_reads_per_s
            took_s = self.its.bucket_latency_ms / 1e3 + part / (self.its.bucket_mb_per_s * 1e6)
            heapq.heapreplace(node.slots, begin_s + took_s)
            ended_s = max(ended_s, begin_s + took_s)
            if self._counting:
                self.counts.gets += 1
        self.at(ended_s, self._filled, node, ident, node.restarts, True)

    def _filled(self, node: _Node, ident: int, restarts: int, ok: bool) -> None:
        """A read from the bucket has ended: send the segment to all who wait for it."""
        if node.restarts != restarts or not node.up:
            return
        jobs = node.filling.pop(ident)
        if ok:
            node.keep(ident, SEGMENT_CHUNKS * self.chunk)
            if self.its.device_tb:
                node.on_device.add(ident)
        for job in jobs:
            if job.live and ok:
                self._send(job)
            elif job.live:
                self._miss(job)
                self._compute_if_placed(job.request)

    # ---- Links

    def _send(self, job: _Job) -> None:
        node = job.node
        node.pass_time(self.now_s)
        job.end, job.sending = node.work + job.size, True
        node.active += 1
        node.queued += job.size
        heapq.heappush(node.ends, (job.end, next(self._order), job))
        self._schedule(node)

    def _schedule(self, node: _Node) -> None:
        node.version += 1
        ends_s = node.next_end_s()
        if ends_s is not None:
            self.at(ends_s, self._sent, node, node.version)

    def _sent(self, node: _Node, version: int) -> None:
        """The transfers with the least work left have ended, unless others came or went meanwhile."""
        if version != node.version:
            return
        node.pass_time(self.now_s)
        ended = []
        while node.ends and (not node.ends[0][2].live or node.ends[0][0] <= node.work + 1.0):  # bytes
            job = heapq.heappop(node.ends)[2]
            if job.live:
                ended.append(job)
                self._close(job)
        self._schedule(node)
        for job in ended:
            self.counts.sent += job.size
            job.request.size += job.size
            if self._is_watched(job):
                self.transfers.append((job.request.begun_s, self.now_s - job.request.begun_s))
            self._compute_if_placed(job.request)

    def _is_watched(self, job: _Job) -> bool:
        return bool(self.watched) and self.placement.ranking(job.segment.partition)[0] == self.watched

    def _close(self, job: _Job) -> None:
        """Take a job from its request, and from its node and link."""
        job.live = False
        job.request.open -= 1
        node = job.node
        del node.jobs[job]
        if job.sending:
            node.active -= 1
            node.queued = max(0.0, node.queued - max(0.0, job.end - node.work)) if node.active else 0.0

    def _miss(self, job: _Job) -> None:
        """Compute what a transfer did not bring."""
        counted = job.counted
        self._abandon(job)
        self.counts.by_source["miss"] += counted
        job.request.missing += job.segment.chunks
        if self._is_watched(job):
            self.transfers.append((job.request.begun_s, math.inf))

    def _abandon(self, job: _Job) -> None:
        self.counts.by_source[job.source] -= job.counted
        if job.sending:
            job.node.pass_time(self.now_s)
        self._close(job)
        self.counts.given_up += job.size
        if job.sending:
            self._schedule(job.node)

    # ---- Engines

    def _give_up(self, request: _Request) -> None:
        """The deadline of a fetch has come: compute what has not arrived."""
        if request.open > 0:
            self.counts.late += 1
            for job in request.jobs:
                if job.live:
                    self._miss(job)
            self._compute_if_placed(request)

    def _compute_if_placed(self, request: _Request) -> None:
        """Once no transfer is open, compute the rest, after the engine's earlier requests."""
        if request.open:
            return
        request.open = -1
        engine = self.engines[request.engine]
        received_s = max(engine.receives_until_s, request.begun_s) + request.size / self.engine_rate
        engine.receives_until_s = received_s
        begin_s = max(self.now_s, received_s, engine.computes_until_s)
        tokens = request.missing * DEFAULT_CHUNK_TOKENS
        engine.computes_until_s = begin_s + tokens / self.its.prefill_tokens_per_s
        self.at(engine.computes_until_s + self.its.first_ms / 1e3, self._first_token, request)

    def _first_token(self, request: _Request) -> None:
        self.counts.ended += 1
        if request.begun_s >= self.counting_from_s:
            self.counts.first_token_s.append(self.now_s - request.begun_s)
        for segment in request.new:
            node = self._choice(segment.partition)[0]
            if not node.up or (segment.chunks == SEGMENT_CHUNKS and self._found(node, segment) is not None):
                continue  # what a store has is not stored again
            self._stored_at_s.setdefault(segment.ident, self.now_s)
            node.met.add(segment.ident)
            node.keep(segment.ident, SEGMENT_CHUNKS * self.chunk)
            if self.its.device_tb:
                node.on_device.add(segment.ident)
            if self._counting:
                self.counts.stored_bytes += segment.chunks * self.chunk
        self.ended(request.engine)

    # ---- Trouble

    def stop(self, name: str) -> None:
        """End a node; its memory is lost. Requests wait for it until :meth:`detect`."""
        node = self.nodes[name]
        node.pass_time(self.now_s)
        node.up = False
        node.restarts += 1
        for job in node.jobs:
            job.sending = False
        node.forget()

    def detect(self, name: str) -> None:
        """All data planes learn that a node is away; what they waited for comes from the next choice."""
        node = self.nodes[name]
        node.known_up = False
        self._choices.clear()
        for job in list(node.jobs):
            self._abandon(job)
            self._begin(job.request, self._choice(job.segment.partition)[0], job.segment, job.size)
            self._compute_if_placed(job.request)

    def start(self, name: str) -> None:
        """A node is back, with its devices."""
        node = self.nodes[name]
        node.up = node.known_up = True
        self._choices.clear()

    def slow(self, name: str, factor: float) -> None:
        node = self.nodes[name]
        node.pass_time(self.now_s)
        node.rate /= factor
        self._schedule(node)

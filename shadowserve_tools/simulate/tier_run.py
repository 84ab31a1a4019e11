"""Simulation of one policy over one trace, event by event: a request arrives, a request ends, a block was moved.

All requests in decoding take one iteration per token, together. The product's own ``PrefetchPolicy`` decides what is
prefetched, and its ``Interleaver`` where static blocks lie. The oracle is ``NextUse`` with a ``PrefetchPolicy`` that
knows requests before they arrive.
"""

import dataclasses
import heapq
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, NamedTuple

from shadowserve.native import IndexPolicy
from shadowserve.pool.interleaver import Interleaver
from shadowserve.pool.prefetch_policy import Hop, PrefetchPolicy, Waiting
from shadowserve_tools.simulate.tier_assumptions import Assumed
from shadowserve_tools.simulate.tier_model import FOREVER_S, Policy, Predicted, Request, Session, Tier, Trace

_WARM_UP_SHARE: Final = 0.2
"""Share of the requests that is not counted, while the tiers fill."""
_PLANNED_BYTES: Final = 8e9
"""Bytes that are planned at a time: the next event plans again."""


@dataclass(frozen=True)
class Rules:
    """Options of the policies that know the waiting requests.

    Attributes:
        lookahead: Requests ahead that are prefetched; the paper's K.
        late_stalls: True if a late block stops all decoding, like a page fault; otherwise only its request waits.
    """

    lookahead: int = 1
    late_stalls: bool = False


class Outcome(NamedTuple):
    """Results of the counted requests.

    Attributes:
        tpot_p95_ms: 95th percentile over requests.
        hit_rate: Bytes in the GPU's memory at their request's turn, of all.
        wasted_bytes: Bytes that were prefetched and never used.
        wait_ms: Mean from arrival to the first iteration.
    """

    tpot_mean_ms: float
    tpot_p95_ms: float
    throughput_tokens_s: float
    hit_rate: float
    wasted_bytes: float
    wait_ms: float


class _Job(NamedTuple):
    """A block on its way over a hop."""

    key: bytes
    size: int
    request: Request | None  # the waiting request; None for a prefetch


def outcome(trace: Trace, policy: Policy, step_ms: float, given: Assumed, rules: Rules) -> Outcome:
    """Return the results of a policy for a trace, whose iterations take ``step_ms`` without transfers."""
    run = _Run(trace, policy, step_ms / 1e3, given, rules)
    run.go()
    counted = run.requests[int(_WARM_UP_SHARE * len(run.requests)) :]
    tpots_ms = [1e3 * (each.ended_s - each.begun_s) / each.tokens for each in counted]
    ended_s = max(each.ended_s for each in counted)
    return Outcome(
        tpot_mean_ms=statistics.fmean(tpots_ms, [each.tokens for each in counted]),
        tpot_p95_ms=statistics.quantiles(tpots_ms, n=20)[-1],
        throughput_tokens_s=sum(each.tokens for each in counted) / (ended_s - counted[0].comes_s),
        hit_rate=sum(each.hit_bytes for each in counted) / sum(each.session.size for each in counted),
        wasted_bytes=float(run.wasted_bytes + sum(run.ahead.values())),
        wait_ms=1e3 * statistics.fmean(each.begun_s - each.comes_s for each in counted),
    )


class _Links:
    """The two links between the tiers. Each moves one block after the other.

    Attributes:
        jobs: Queue of each link; its first job is in transit, until ``ends``.
        moving: Keys of all queued blocks.
    """

    def __init__(self, hops: Sequence[Hop]) -> None:
        self.hops = hops
        self.jobs: tuple[deque[_Job], deque[_Job]] = (deque(), deque())
        self.ends = [math.inf, math.inf]
        self.moving: set[bytes] = set()

    def add(self, hop: int, job: _Job, now: float) -> None:
        """Queue a job, before the prefetches if a request waits for it."""
        link = self.jobs[hop]
        waited_for = sum(1 for each in link if each.request is not None)
        link.insert(max(waited_for, min(1, len(link))) if job.request is not None else len(link), job)
        if len(link) == 1:
            self.ends[hop] = now + self.hops[hop].seconds(job.size)
        self.moving.add(job.key)

    def pop(self, hop: int, now: float) -> _Job:
        """Remove the job in transit, which has ended, and begin the next one."""
        link = self.jobs[hop]
        job = link.popleft()
        self.ends[hop] = now + self.hops[hop].seconds(link[0].size) if link else math.inf
        self.moving.discard(job.key)
        return job


class _Run:
    """The state of a run."""

    def __init__(self, trace: Trace, policy: Policy, step_s: float, given: Assumed, rules: Rules) -> None:
        self.trace, self.policy, self.step_s, self.given = trace, policy, step_s, given
        self.stalls = policy.foresees is None or rules.late_stalls
        self.sessions = [dataclasses.replace(each, below=[0.0, 0.0], known=deque()) for each in trace.sessions]
        self.requests = [
            dataclasses.replace(each, session=self.sessions[each.session.number], lacks=set())
            for each in trace.requests
        ]
        self.session_of = {key: each for each in self.sessions for key in each.keys}
        self.links = _Links(given.hops())
        self.hbm = Tier(given.hbm_gb * 1e9, len(self.session_of), policy.eviction, self._left_hbm)
        self.memory = Tier(given.memory_gb * 1e9, len(self.session_of), IndexPolicy.LRU, self._left_memory)
        # The oracle starts as early as is certain to suffice. Earlier it might evict KV that is being decoded with.
        ahead_s = self.links.hops[0].seconds(trace.running_bytes_max)
        self.prefetch = PrefetchPolicy(None, ahead_s) if policy.foresees else PrefetchPolicy(rules.lookahead)
        self.predicted = Predicted(self.sessions, self.hbm) if policy.predicts else None
        if self.predicted is not None:
            self.hbm.victim = self.predicted.victim
        self.now = self.steps = self.running_bytes = 0.0
        self.arrived = self.foreseen = 0
        self.queue: deque[Request] = deque()
        self.running: list[tuple[float, int]] = []  # last iteration and number of each running request
        self.ahead: dict[bytes, int] = {}  # prefetched blocks without a use
        self.wasted_bytes = 0
        self.passing: set[bytes] = set()  # static: blocks whose tier is below
        self.filled: tuple[Tier, ...] = ()  # tiers that cannot hold everything
        self._fill()

    # ---- Placement

    def _fill(self) -> None:
        """Fill the tiers; which blocks are in the HBM is arbitrary."""
        total, size = sum(each.size for each in self.sessions), self.given.hbm_gb * 1e9
        self.filled = (self.hbm, self.memory) if total > self.given.memory_gb * 1e9 else (self.hbm,)
        if self.policy.static and total > size:
            share = max(0.0, size - self.trace.running_bytes_max) / total
            homes = Interleaver([share, 1 - share])
            for session in self.sessions:
                before = b""
                for key, length in zip(session.keys, session.sizes, strict=True):
                    home = homes.order(length, before, [True, True])[0]
                    homes.place(home, length, before, key, [True, True])
                    before = key
                    if home:
                        self.passing.add(key)
        room, below = size, self.given.memory_gb * 1e9
        for session in self.sessions:
            for key, length in zip(session.keys, session.sizes, strict=True):
                below -= length
                if below >= 0 and self.memory.reserve(length):
                    self.memory.put(key, length)
                if key not in self.passing and room >= length:
                    room -= length
                    self.hbm.reserve(length)
                    self.hbm.put(key, length)
                    if self.policy.static:
                        self.hbm.pin(key)
                else:
                    session.below[0 if below >= 0 else 1] += length

    def _left_hbm(self, key: bytes, size: int) -> None:
        self.wasted_bytes += self.ahead.pop(key, 0)
        self.session_of[key].below[0 if self.memory.slot(key) else 1] += size

    def _left_memory(self, key: bytes, size: int) -> None:
        if not self.hbm.slot(key) and key not in self.links.moving:
            below = self.session_of[key].below
            below[0] -= size
            below[1] += size

    # ---- Time

    def go(self) -> None:
        """Run until every request has ended."""
        ended = 0
        while ended < len(self.requests):
            comes = self.requests[self.arrived].comes_s if self.arrived < len(self.requests) else math.inf
            slowed = self.links.hops[0].bytes_per_s / (self.given.hbm_gb_per_s * 1e9) if self.links.jobs[0] else 0.0
            step_s = self.step_s * (1 + slowed)
            ends = self.now + (self.running[0][0] - self.steps) * step_s if self.running else math.inf
            then = max(self.now, min(comes, ends, *self.links.ends))
            self.steps += (then - self.now) / step_s
            self.now = then
            if ends <= then:
                self._end(self.requests[heapq.heappop(self.running)[1]])
                ended += 1
            elif comes <= then:
                self.queue.append(self.requests[self.arrived])
                self.arrived += 1
            else:
                self._land(self.links.ends.index(min(self.links.ends)))
            self._announce()
            self._schedule()
            self._prefetch()

    # ---- Requests

    def _announce(self) -> None:
        if self.policy.foresees is None:
            return
        while self.foreseen < min(self.arrived + self.policy.foresees, len(self.requests)):
            request = self.requests[self.foreseen]
            request.session.known.append(request.number)
            self._publish(request.number, request.session)
            self.foreseen += 1

    def _publish(self, number: int, session: Session) -> None:
        for tier in self.filled:
            tier.next_use.publish(number, 0, session.keys, FOREVER_S)

    def _schedule(self) -> None:
        """Start the next requests, in order, while slots and memory allow it and their blocks are in the HBM."""
        while self.queue:
            head = self.queue[0]
            if head.turn_s is None:
                fits = self.running_bytes + head.session.size <= self.trace.running_bytes_max
                if len(self.running) == self.trace.slots or not (fits or not self.running):
                    return
                self._take_turn(head)
            if head.lacks:
                return
            self.queue.popleft()
            head.begun_s = self.now
            self.running_bytes += head.session.size
            heapq.heappush(self.running, (self.steps + head.tokens, head.number))
            if self.predicted is not None:
                self.predicted.use(head.session)

    def _take_turn(self, request: Request) -> None:
        request.turn_s = self.now
        session = request.session
        if request.number in session.known:
            session.known.remove(request.number)
            for tier in self.filled:
                tier.next_use.withdraw(request.number)
        for key, size in zip(session.keys, session.sizes, strict=True):
            if self.hbm.slot(key):
                request.hit_bytes += size
                self.hbm.pin(key)
                self.ahead.pop(key, None)
            else:
                request.lacks.add(key)
        if request.lacks and self.stalls:
            self._fault(request)
        else:
            self._load(request)

    def _end(self, request: Request) -> None:
        request.ended_s = self.now
        session = request.session
        self.running_bytes -= session.size
        for key, size in zip(session.keys, session.sizes, strict=True):
            if self.hbm.unpin(key) and key in self.passing:
                self.hbm.drop(key)
                self._left_hbm(key, size)
        if session.known:
            self._publish(session.known[0], session)
        if self.predicted is not None:
            self.predicted.given_back()

    # ---- Moving

    def _fault(self, request: Request) -> None:
        session = request.session
        while self.links.jobs[0] and self.links.moving & request.lacks:  # transfers that have begun arrive first
            self.now = max(self.now, self.links.ends[0])
            self._land(0)
        seconds = 0.0
        for key, size in zip(session.keys, session.sizes, strict=True):
            if key not in request.lacks:
                continue
            hops = self.links.hops[:1] if self.memory.slot(key) else self.links.hops
            seconds += sum(hop.seconds(size) for hop in hops) + (
                0 if self.policy.copies_below else hops[0].seconds(size)
            )
            session.below[len(hops) - 1] -= size
            assert self.hbm.reserve(size), "no space for a block, although decoding uses half of the memory"
            self.hbm.put(key, size)
            self.hbm.pin(key)
        request.lacks.clear()
        self.now += seconds

    def _load(self, request: Request) -> None:
        session = request.session
        for key, size in zip(session.keys, session.sizes, strict=True):
            if key in request.lacks and key not in self.links.moving:
                self._issue(_Job(key, size, request), None)

    def _issue(self, job: _Job, sake: int | None) -> bool:
        """Queue a block's next hop, first if a request waits for it; return False if there is no space for it."""
        hop = 0 if self.memory.slot(job.key) else 1
        if not (self.hbm, self.memory)[hop].reserve(job.size, sake):
            assert job.request is None, "no space for a block, although decoding uses half of the memory"
            return False
        self.session_of[job.key].below[hop] -= job.size
        self.links.add(hop, job, self.now)
        return True

    def _land(self, hop: int) -> None:
        job = self.links.pop(hop, self.now)
        session = self.session_of[job.key]
        (self.hbm, self.memory)[hop].put(job.key, job.size)
        head = self.queue[0] if self.queue else None
        waited_for = head is not None and job.key in head.lacks
        if hop:
            session.below[0] += job.size
            if waited_for:
                self._issue(job._replace(request=head), None)
        elif waited_for and head is not None:
            head.lacks.discard(job.key)
            self.hbm.pin(job.key)
        else:
            self.ahead[job.key] = job.size
        if session.known:
            self._publish(session.known[0], session)

    def _prefetch(self) -> None:
        if self.predicted is not None:
            self._prefetch_predicted(self.predicted)
        elif self.policy.foresees is not None and not all(self.links.jobs):
            promised = [float(sum(job.size for job in link)) for link in self.links.jobs]
            for move in self.prefetch.plan(self._waiting(), self.links.hops, promised):
                assert isinstance(move.request, int)
                if not self._begin(self.requests[move.request], move.hop, move.size):
                    return  # KV of later requests would only be evicted again

    def _waiting(self) -> Iterator[Waiting]:
        gap_s = self.step_s * self.trace.mean_tokens / max(1, len(self.running))
        first = 1 if self.queue and self.queue[0].turn_s is not None else 0
        later = (self.requests[number] for number in range(self.arrived, self.foreseen))
        planned = 0.0
        for place, request in enumerate(chain(islice(self.queue, first, None), later), start=1):
            below = request.session.below
            yield Waiting(request.number, max(request.comes_s - self.now, place * gap_s), below)
            planned += sum(below)
            if planned > _PLANNED_BYTES:
                return

    def _begin(self, request: Request, hop: int, size: float) -> bool:
        """Issue a request's first blocks in a tier, up to a number of bytes; return False if there was no space."""
        session = request.session
        for key, length in zip(session.keys, session.sizes, strict=True):
            lies_there = (hop == 0) == bool(self.memory.slot(key))
            if key in self.links.moving or self.hbm.slot(key) or not lies_there:
                continue
            size -= length
            if size < 0:
                break
            if not self._issue(_Job(key, length, None), request.number):
                return False
        return True

    def _prefetch_predicted(self, predicted: Predicted) -> None:
        session = None if self.links.jobs[0] else predicted.best()
        if session is None:
            return
        for key, size in zip(session.keys, session.sizes, strict=True):
            if not self.hbm.slot(key) and self.memory.slot(key):
                self._issue(_Job(key, size, None), session.number)
                return

"""The waiting requests of all engines' queues, merged into one order for the source.

Engines send changes in numbered messages. Late messages are ignored; after a missing one the host is asked for the
whole queue. A queue expires at the time that its host has named, so that the queue of a dead engine ends.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from dpu_dataplane.sources.source import Chain, WaitingRequest
from shadowserve.pool.next_use import REQUESTS_MAX
from shadowserve.proto import dataplane_pb2 as pb

QUEUE_KEYS_MAX: Final = 1 << 18  # most keys of all queues together, some 30 MB: 512 prompts of 128K tokens
_QUEUES_MAX: Final = 64  # most queues of a host, including those of dead engines that have not expired yet


class _Queue:
    def __init__(self) -> None:
        self.number = 0  # number of the last message
        self.until = 0.0  # time of expiry
        self.chains: dict[int, list[Chain]] = {}  # chains of the waiting requests, in their order
        self.begins_at: dict[int, float] = {}  # probable begin of requests, if known

    @property
    def keys(self) -> int:
        return sum(len(keys) for chains in self.chains.values() for _, keys in chains)


class Queues:
    """The queues of all hosts; each host has an equal share of requests and keys."""

    def __init__(self, hosts_max: int, clock: Callable[[], float]) -> None:
        self._requests_max = max(1, REQUESTS_MAX // hosts_max)
        self._keys_max = max(1, QUEUE_KEYS_MAX // hosts_max)
        self._clock = clock
        self._queues: dict[str, dict[bytes, _Queue]] = {}

    def update(self, owner: str, request: pb.ExpectRequest, arrivals: Sequence[tuple[int, list[Chain]]]) -> bool:
        """Apply a validated message and its arrivals; return False if earlier messages are missing, so that it is not.

        Requests beyond the host's share are ignored: they are served without prefetching.
        """
        self._expire()
        now, mine = self._clock(), self._queues.setdefault(owner, {})
        queue = mine.get(request.queue)
        if queue is not None and request.number <= queue.number:
            return True  # a later message was applied already
        if request.whole and (queue is not None or len(mine) < _QUEUES_MAX):
            queue = mine[request.queue] = _Queue()
        elif queue is None or request.number != queue.number + 1:
            return False
        queue.number, queue.until = request.number, now + request.lasts_ms / 1000
        for gone in request.gone:
            queue.chains.pop(gone, None)
            queue.begins_at.pop(gone, None)
        self._add(mine, queue, arrivals)
        if request.order:
            ordered = {each: queue.chains[each] for each in request.order if each in queue.chains}
            queue.chains = ordered | queue.chains
            expected = zip(request.order, request.begins_in_ms, strict=bool(request.begins_in_ms))
            queue.begins_at = {each: now + ms / 1000 for each, ms in expected if each in ordered}
        return True

    def _add(self, mine: dict[bytes, _Queue], queue: _Queue, arrivals: Sequence[tuple[int, list[Chain]]]) -> None:
        requests = sum(len(each.chains) for each in mine.values())
        keys = sum(each.keys for each in mine.values())
        for name, chains in arrivals:
            old = queue.chains.get(name)
            more = sum(len(each) for _, each in chains) - sum(len(each) for _, each in old or ())
            if keys + more > self._keys_max or (old is None and requests >= self._requests_max):
                continue
            keys, requests = keys + more, requests + (old is None)
            queue.chains[name] = chains

    def waiting(self) -> list[WaitingRequest]:
        """Return all waiting requests by their probable begin; each queue in its own order."""
        self._expire()
        positions: list[tuple[float, int, WaitingRequest]] = []
        for owner, mine in self._queues.items():
            for name, queue in mine.items():
                latest = 0.0
                for position, (request, chains) in enumerate(queue.chains.items()):
                    begins_at = queue.begins_at.get(request, math.inf)
                    latest = max(latest, begins_at)
                    waiting = WaitingRequest((owner, name, request), chains, begins_at, queue.until)
                    positions.append((latest, position, waiting))
        return [each for _, _, each in sorted(positions, key=lambda of: of[:2])]

    def _expire(self) -> None:
        now = self._clock()
        for owner, mine in list(self._queues.items()):
            for name in [name for name, queue in mine.items() if queue.until <= now]:
                del mine[name]
            if not mine:
                del self._queues[owner]

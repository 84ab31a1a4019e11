"""What waits in engines' queues, as hosts tell it: put together to one order of requests for the source to know.

Each engine of a host has a queue, and says what changes in it, message by message. One that comes late is passed over;
where one is missing, the host is asked to say everything anew, as after a restart of this daemon. Nothing is kept of a
queue for longer than its host says, so that one of an engine that has died ends by itself.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from dpu_dataplane.sources.source import Chain, Expected
from shadowserve.pool.next_use import REQUESTS_MAX
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["QUEUE_KEYS_MAX", "Queues"]

QUEUE_KEYS_MAX: Final = 1 << 18
"""Keys of all queues together, some 30 MB: 512 prompts of 128K tokens."""
_QUEUES_MAX: Final = 64
"""Of one host: engines, and those of their predecessors that have not ended by themselves yet."""


class _Queue:
    """One engine's queue.

    Attributes:
        number: of the last message.
        until: when it is forgotten.
        chains: of requests that wait, in their order.
        begins_at: when those will probably begin of which it is known.
    """

    def __init__(self) -> None:
        self.number = 0
        self.until = 0.0
        self.chains: dict[int, list[Chain]] = {}
        self.begins_at: dict[int, float] = {}

    @property
    def keys(self) -> int:
        return sum(len(keys) for chains in self.chains.values() for _, keys in chains)


class Queues:
    """The queues of all hosts; each host may have an equal share of requests and keys.

    Args:
        hosts_max: that are connected at a time.
        clock: seconds, monotonic.
    """

    def __init__(self, hosts_max: int, clock: Callable[[], float]) -> None:
        self._requests_max = max(1, REQUESTS_MAX // hosts_max)
        self._keys_max = max(1, QUEUE_KEYS_MAX // hosts_max)
        self._clock = clock
        self._queues: dict[str, dict[bytes, _Queue]] = {}

    def take(self, owner: str, request: pb.ExpectRequest, arrivals: Sequence[tuple[int, list[Chain]]]) -> bool:
        """Take a message that was checked; return False where some before it are missing, and it is of no use.

        What is beyond the host's share is not noted: such requests are served as if nobody had told of them.

        Args:
            owner: the host.
            request: its message.
            arrivals: requests of it, and their chains.
        """
        self._expire()
        now, mine = self._clock(), self._queues.setdefault(owner, {})
        queue = mine.get(request.queue)
        if queue is not None and request.number <= queue.number:
            return True  # what came after it has said more
        if request.whole and (queue is not None or len(mine) < _QUEUES_MAX):
            queue = mine[request.queue] = _Queue()
        elif queue is None or request.number != queue.number + 1:
            return False
        queue.number, queue.until = request.number, now + request.lasts_ms / 1000
        for gone in request.gone:
            queue.chains.pop(gone, None)
            queue.begins_at.pop(gone, None)
        self._note(mine, queue, arrivals)
        if request.order:
            ordered = {each: queue.chains[each] for each in request.order if each in queue.chains}
            queue.chains = ordered | queue.chains
            expected = zip(request.order, request.begins_in_ms, strict=bool(request.begins_in_ms))
            queue.begins_at = {each: now + ms / 1000 for each, ms in expected if each in ordered}
        return True

    def _note(self, mine: dict[bytes, _Queue], queue: _Queue, arrivals: Sequence[tuple[int, list[Chain]]]) -> None:
        requests = sum(len(each.chains) for each in mine.values())
        keys = sum(each.keys for each in mine.values())
        for name, chains in arrivals:
            old = queue.chains.get(name)
            more = sum(len(each) for _, each in chains) - sum(len(each) for _, each in old or ())
            if keys + more > self._keys_max or (old is None and requests >= self._requests_max):
                continue
            keys, requests = keys + more, requests + (old is None)
            queue.chains[name] = chains

    def expected(self) -> list[Expected]:
        """Return all requests that wait: what begins first, first; each queue in its own order."""
        self._expire()
        places: list[tuple[float, int, Expected]] = []
        for owner, mine in self._queues.items():
            for name, queue in mine.items():
                latest = 0.0
                for place, (request, chains) in enumerate(queue.chains.items()):
                    begins_at = queue.begins_at.get(request, math.inf)
                    latest = max(latest, begins_at)
                    places.append((latest, place, Expected((owner, name, request), chains, begins_at, queue.until)))
        return [each for _, _, each in sorted(places, key=lambda of: of[:2])]

    def _expire(self) -> None:
        now = self._clock()
        for owner, mine in list(self._queues.items()):
            for name in [name for name, queue in mine.items() if queue.until <= now]:
                del mine[name]
            if not mine:
                del self._queues[owner]

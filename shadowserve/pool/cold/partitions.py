"""Which partitions of the bucket a node knows, and when it lists each of them."""

import random
import threading
from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import Final

from shadowserve.placement import PARTITIONS

_OWN_TIMES: Final = 60
"""Intervals between two lists of a partition that the node serves: it learns of others' objects by their news."""
_FORGOTTEN_TIMES: Final = 10
"""Intervals after which a partition of another node is forgotten if no client has asked for its records."""
_ASKED_MAX: Final = 512
"""Partitions of other nodes that are listed in each interval; of more, each is listed more rarely after its first list.
Random keys would cost a list of each partition."""


class Partitions:
    """Partitions that the node serves, and those of other nodes while clients ask for them.

    Any thread may call :meth:`ask` and :meth:`list_again`. The others are for one thread at a time, except
    :meth:`note_listed` and :meth:`note_failed` for different partitions.

    Attributes:
        own: Partitions that the node serves.
        changed: Is set when a partition has become due.
    """

    def __init__(self, serves: Callable[[int], bool] | None, interval_s: float, clock_s: Callable[[], float]) -> None:
        """``serves`` returns whether this node is the first choice for a partition; None: it has no fleet."""
        self.own: Collection[int] = range(PARTITIONS) if serves is None else frozenset()
        self.changed = threading.Event()
        self.serves = serves
        self._interval_s = interval_s
        self._clock_s = clock_s
        self._due_s: dict[int, float] = {}  # when to list each known partition
        self._asked_s: dict[int, float] = {}  # last question about each partition of another node

    def ask(self, partition: int) -> None:
        """Keep a partition known for a while: a client asks for its records. It does not wait."""
        if partition in self.own:
            return
        now_s = self._clock_s()
        self._asked_s[partition] = now_s
        if self._due_s.setdefault(partition, now_s) <= now_s:
            self.changed.set()

    def list_again(self, partition: int) -> None:
        """Let a known partition be due. It does not wait."""
        if partition in self._due_s:
            self._due_s[partition] = min(self._due_s[partition], self._clock_s())
            self.changed.set()

    def follow(self) -> list[int]:
        """Find out which partitions the node serves now; return those to forget, as no client asks for them."""
        assert self.serves is not None
        now_s, before, forgotten = self._clock_s(), frozenset(self.own), []
        self.own = frozenset(filter(self.serves, range(PARTITIONS)))
        for partition in self.own - before:
            self._due_s[partition] = min(self._due_s.get(partition, now_s), now_s)
            self._asked_s.pop(partition, None)
        for partition in before - self.own:
            self._asked_s[partition] = now_s
            self._due_s[partition] = min(self._due_s[partition], now_s + self._interval_s)
        for partition, asked_s in list(self._asked_s.items()):
            if partition in self.own:  # ask() has overlapped with the change
                self._asked_s.pop(partition, None)
            elif now_s - asked_s > _FORGOTTEN_TIMES * self._interval_s:
                self._asked_s.pop(partition, None)
                self._due_s.pop(partition, None)
                forgotten.append(partition)
        return forgotten

    def due(self) -> list[int]:
        """Return the partitions to list now: first those of other nodes, for which a client waits."""
        now_s = self._clock_s()
        due = [
            (partition in self.own, due_s, partition)
            for partition, due_s in list(self._due_s.items())
            if due_s <= now_s
            and (partition in self.own or self._asked_s.get(partition, -inf) >= due_s - self._interval_s)
        ]
        return [partition for *_, partition in sorted(due)]

    def note_listed(self, partitions: Iterable[int], began_s: float) -> None:
        """Note that one list has shown these partitions: those of the node are due together again."""
        own_s = self._interval_s * _OWN_TIMES * random.uniform(0.75, 1.25)
        asked_s = self._interval_s * max(1.0, len(self._asked_s) / _ASKED_MAX)
        for partition in partitions:
            self._due_s[partition] = began_s + (own_s if partition in self.own else asked_s)

    def note_failed(self, partitions: Iterable[int]) -> None:
        """Let questions about partitions of other nodes cause no list for a while."""
        for partition in partitions:
            if partition not in self.own:
                self._due_s[partition] = self._clock_s() + min(self._interval_s, 1.0)

    @property
    def is_complete(self) -> bool:
        """True if no list of a partition that the node serves is due."""
        now_s = self._clock_s()
        return all(self._due_s[partition] > now_s for partition in self.own)

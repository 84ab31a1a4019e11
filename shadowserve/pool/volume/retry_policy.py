"""Retries operations that a device was too busy for, after pauses that double.

A busy device, or a kernel short of memory, has not failed. Such an error is reported after a time: a short one for a
read, which its client can do without; a long one for a write or flush, whose failure may end the use of the device.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from shadowserve.block import Operation, OperationKind
from shadowserve.errors import is_passing

_FIRST_NS: Final = 1_000_000
_LONGEST_NS: Final = 500_000_000
_READ_NS: Final = 1_000_000_000
_WRITE_NS: Final = 10_000_000_000


@dataclass(slots=True, eq=False)
class _Tried:
    operation: Operation
    since_ns: int
    pause_ns: int
    due_ns: int


class RetryPolicy:
    """Operations of one device that wait to be tried again. The device's driver calls ended() and due() in turns."""

    def __init__(self) -> None:
        self.met = 0  # number of passing errors
        self._tried: dict[int, _Tried] = {}
        self._waiting: deque[_Tried] = deque()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def ended(self, operations: list[Operation]) -> list[Operation]:
        if not self._tried and all(operation.error is None for operation in operations):
            return operations
        return [operation for operation in operations if not self._waits(operation)]

    def due(self) -> list[Operation]:
        if not self._waiting:
            return []
        now_ns = time.monotonic_ns()
        due = [tried for tried in self._waiting if tried.due_ns <= now_ns]
        for tried in due:
            self._waiting.remove(tried)
            tried.operation.error = None
        return [tried.operation for tried in due]

    def _waits(self, operation: Operation) -> bool:
        tried = self._tried.pop(id(operation), None)
        flushing = operation.kind is OperationKind.FLUSH
        # A read into pages has reported its progress already: a retry would report it twice.
        if operation.error is None or operation.pages is not None:
            return False
        if not is_passing(operation.error, flushing=flushing):
            return False
        self.met += 1
        now_ns = time.monotonic_ns()
        if tried is None:
            tried = _Tried(operation, now_ns, _FIRST_NS, 0)
        elif now_ns - tried.since_ns > (_READ_NS if operation.kind is OperationKind.READ else _WRITE_NS):
            return False
        tried.due_ns = now_ns + tried.pause_ns
        tried.pause_ns = min(2 * tried.pause_ns, _LONGEST_NS)
        self._tried[id(operation)] = tried
        self._waiting.append(tried)
        return True

"""A lock that counts the work of each hold: steps of the interpreter, not time."""

import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Final

WORK_MAX: Final = 400_000
"""Maximum steps in one hold. One takes 20 ns, calls into C included: 8 ms. 250 evictions from a device take 360,000;
removing 3,000 keys would take a million."""


class WorkMeter:
    """A lock. After begin() it counts the interpreter's steps of each hold."""

    def __init__(self) -> None:
        self.longest = 0  # steps of the longest hold
        self._lock = threading.Lock()
        self._counts = False
        self._steps = 0

    def begin(self) -> None:
        self.longest = 0
        self._counts = True

    def end(self) -> int:
        """Stop counting. Return the steps of the longest hold."""
        self._counts = False
        return self.longest

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got = self._lock.acquire(blocking, timeout)
        if got and self._counts:
            self._steps = 0
            self._trace_callers(self._trace)
            sys.settrace(self._trace)
        return got

    def release(self) -> None:
        if sys.gettrace() == self._trace:
            sys.settrace(None)
            self._trace_callers(None)
            self.longest = max(self.longest, self._steps)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _trace_callers(self, trace: Any) -> None:
        """Start or stop counting for functions that are already running."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            frame.f_trace = trace
            frame.f_trace_opcodes = trace is not None
            frame = frame.f_back

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        self._steps += event == "opcode"
        return self._trace

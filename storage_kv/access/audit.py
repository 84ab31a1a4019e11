"""The audit log: a line of JSON for each event, in a file that is rotated by size.

It never holds keys, values or passwords. A thread writes it, so a slow disk delays no client. Events that any client
can cause are limited to some lines a minute and then counted, so that they cannot crowd out others.
"""

import json
import logging
import os
import queue
import threading
import time
from datetime import UTC, datetime
from typing import Any, Final

from shadowserve.incidents import Incidents
from storage_kv.access.authentication_throttle import network_of
from storage_kv.session import Session

_log = logging.getLogger(__name__)

_LINES_WAITING_MAX: Final = 4096
_RETRY_S: Final = 5.0
_LINE_BYTES_MAX: Final = 2048
_TEXT_MAX: Final = 256
_LINES_PER_MINUTE: Final = 64  # lines of one event and one network; further ones are counted


class AuditLog:
    """Writes events to a file, or drops them if there is none.

    ``written`` and ``lost`` count lines.
    """

    def __init__(self, path: str = "", bytes_max: int = 64 << 20) -> None:
        """Open the log; an empty path writes nothing. A file that cannot be opened is tried again later."""
        self._path = path
        self._bytes_max = bytes_max
        self._lines: queue.Queue[bytes | None] = queue.Queue(_LINES_WAITING_MAX)
        self._file: int | None = None
        self._failed_s: float | None = None
        self._limiter = Incidents(_LINES_PER_MINUTE, alike=True)
        self.written = 0
        self.lost = 0
        self._thread: threading.Thread | None = None
        if path:
            self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
            self._thread.start()

    def write(
        self,
        event: str,
        session: Session,
        *,
        outcome: str,
        user: bytes | None = None,
        each: bool = False,
        **details: Any,
    ) -> None:
        """Log an event without waiting. Needs the node's lock, like all methods except close().

        ``user``: the requested user, by default the session's. ``each``: write a line for each event, because only
        administrators can cause it. ``details``: texts or numbers; never keys, values or passwords.
        """
        if self._thread is None:
            return
        who = _text(session.user_name if user is None else user)
        kind = f"{event} {_text(session.user_name)}"  # the authenticated user: a client can claim any name
        if each or self._limiter.note(kind, network_of(session.address), who, time.monotonic()):
            self._queue(event, user=who, address=session.address, outcome=outcome, **details)

    def write_repeats(self, now_s: float) -> None:
        """Log the counts of limited events whose minute is over."""
        for kind, address, times, last_user in self._limiter.due(now_s):
            self._queue(kind.partition(" ")[0], user=last_user, address=address, outcome="repeated", times=times)

    def _queue(self, event: str, **details: Any) -> None:
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": event,
            **{name: _text(value) if isinstance(value, str | bytes) else value for name, value in details.items()},
        }
        try:
            self._lines.put_nowait(json.dumps(entry).encode()[:_LINE_BYTES_MAX] + b"\n")
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        if self._thread is not None:
            try:
                self._lines.put(None, timeout=1.0)
            except queue.Full:
                return  # the disk does not answer; the thread ends with the process
            self._thread.join(timeout=5.0)
            self._thread = None

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._append(line)
                self.written += 1
            except OSError as error:
                self.lost += 1
                self._close_file()
                if self._failed_s is None:
                    _log.error("audit_log_failed file=%s error=%r", self._path, str(error))
                self._failed_s = time.monotonic()
        self._close_file()

    def _append(self, line: bytes) -> None:
        if self._file is None:
            if self._failed_s is not None and time.monotonic() - self._failed_s < _RETRY_S:
                raise OSError("the file is retried later")
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if self._failed_s is not None:
                _log.info("audit_log_recovered file=%s lost=%d", self._path, self.lost)
                self._failed_s = None
        status = os.fstat(self._file)
        if status.st_size and status.st_size + len(line) > self._bytes_max:
            self._close_file()
            os.replace(self._path, f"{self._path}.1")
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.write(self._file, line) != len(line):
            raise OSError("the disk is full")

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _text(value: str | bytes) -> str:
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
    return text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."

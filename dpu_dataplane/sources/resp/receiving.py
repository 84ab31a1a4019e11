"""Receives of stored bytes into the caller's memory, in a thread that reads the socket without the GIL."""

import select
import time
from typing import Final

from dpu_dataplane.sources.resp.links import Link
from shadowserve.native import Result, TlsWant

_LINE_MAX: Final = 1024  # most bytes of an answer's first line: a length, or an error
_EVENTS: Final = {TlsWant.READ: select.POLLIN, TlsWant.WRITE: select.POLLOUT}


def receive_answer(link: Link, command: bytes, memory: memoryview, deadline_ns: int) -> tuple[Result, str]:
    """Send a GETRANGE and receive its answer into memory; return the result with the error text. Blocks."""
    stream = _Stream(link, deadline_ns)
    try:
        stream.send(command)
        line, rest = stream.receive_line(len(memory) + 2)
        if line[:1] == b"-":
            return Result.REFUSED, line[1:].decode("utf-8", "replace")
        if line == b"$-1":
            return Result.NOT_FOUND, ""
        size = int(line[1:]) if line[:1] == b"$" and line[1:].isdigit() else -1
        if not 0 <= size <= len(memory):
            return Result.PROTOCOL, "its answer to GETRANGE has another length than requested"
        received = rest[:size]
        memory[: len(received)] = received
        stream.fill(memory[len(received) : size])
        end = memoryview(bytearray(max(2 - len(rest[size:]), 0)))
        stream.fill(end)
        if rest[size:] + end != b"\r\n":
            return Result.PROTOCOL, "its answer has another length than its header says"
        return (Result.OK if size == len(memory) else Result.NOT_FOUND), ""
    except TimeoutError:
        return Result.DEADLINE, "not answered in time"
    except OSError as error:
        return Result.DISCONNECTED, f"the connection broke: {error.strerror or error}"


class _Stream:
    """Blocking reads and writes on a link.

    Raises:
        TimeoutError: The deadline has passed.
        OSError: The connection broke.
    """

    def __init__(self, link: Link, deadline_ns: int) -> None:
        self._link = link
        self._deadline_ns = deadline_ns

    def _wait(self, events: int) -> None:
        poll = select.poll()
        poll.register(self._link.fileno(), events)
        if not poll.poll(max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e6)):
            raise TimeoutError

    def send(self, data: bytes) -> None:
        while data:
            if (session := self._link.session) is None:
                try:
                    data = data[self._link.sock.send(data) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT)
                continue
            result, want, sent = session.send(data)
            self._check(result)
            data = data[sent:]
            if want is not TlsWant.NOTHING:
                self._wait(_EVENTS[want])

    def receive_line(self, most: int) -> tuple[bytes, bytes]:
        """Receive a line; return it without its end, and what came after it: at most ``most`` bytes."""
        data, part = b"", memoryview(bytearray(min(most, _LINE_MAX)))
        while b"\r\n" not in data:
            if len(data) > _LINE_MAX:
                raise ConnectionError("an answer without an end of line")
            data += part[: self._receive(part)]
        line, _, rest = data.partition(b"\r\n")
        return line, rest

    def fill(self, memory: memoryview) -> None:
        """Receive as many bytes as fit."""
        while memory:
            memory = memory[self._receive(memory) :]

    def _receive(self, memory: memoryview) -> int:
        while True:
            if (session := self._link.session) is None:
                try:
                    received = self._link.sock.recv_into(memory)
                except BlockingIOError:
                    self._wait(select.POLLIN)
                    continue
            else:
                result, want, received = session.receive_into(memory)
                self._check(result)
                if not received:
                    self._wait(_EVENTS[want])
                    continue
            if not received:
                raise ConnectionError("it closed the connection")
            return received

    def _check(self, result: Result) -> None:
        if result is not Result.OK:
            assert self._link.session is not None
            raise ConnectionError(self._link.session.reason)

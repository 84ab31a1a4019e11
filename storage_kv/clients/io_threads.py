"""The threads that serve clients, so that a server that mostly copies into sockets uses several cores.

Python releases its interpreter lock for the system calls that copy a large value: nine tenths of the time of a GET of
2 MiB. So event loops in threads copy side by side, and commands run one at a time, under the node's lock.

A connection belongs to one thread for its life. The main thread reaches connections through :meth:`IoThread.each`.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Final

from storage_kv.clients.connection import Connection
from storage_kv.clients.event_loop import EventLoop
from storage_kv.clients.secure_connection import SecureConnection
from storage_kv.clients.transport import Transport
from storage_kv.clients.workers import Workers
from storage_kv.node import Node
from storage_kv.session import Session

_AUTOMATIC_MAX: Final = 4


def threads_for(configured: int) -> int:
    """Return the number of threads: as configured or, for 0, half of this process's cores, 1 to 4."""
    return configured or max(1, min(_AUTOMATIC_MAX, len(os.sched_getaffinity(0)) // 2))


class IoThread:
    """A thread with an event loop and its connections. ``clients``, their number, needs the node's lock."""

    def __init__(self, number: int, node: Node, workers: Workers, on_closed: Callable[[], None]) -> None:
        """Start the thread; raise OSError if nothing is left for it. ``on_closed`` is called in this thread."""
        self.clients = 0
        self._node = node
        self._workers = workers
        self._on_closed = on_closed
        self._connections: dict[Session, Connection] = {}
        self._loop = EventLoop()
        # A daemon, so that an error in the main thread ends the process and not only the accepting.
        self._thread = threading.Thread(target=self._loop.run, name=f"io-{number}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise OSError(str(error)) from error

    def serve(self, transport: Transport, session: Session) -> None:
        """Serve a new client, which ``clients`` includes already, until its end."""
        self._loop.call_threadsafe(lambda: self._serve(transport, session))

    def _serve(self, transport: Transport, session: Session) -> None:
        kind = SecureConnection if transport.is_secure else Connection
        self._connections[session] = kind(self._node, self._workers, self._remove, transport, session, self._loop)

    def _remove(self, session: Session) -> None:
        self._connections.pop(session, None)
        with self._node.lock:
            self.clients -= 1
            self._node.sessions.pop(session.id, None)
            self._node.slots.leave(session)
        self._on_closed()

    def each(self, action: Callable[[Connection], None]) -> None:
        self._loop.call_threadsafe(lambda: self._each(action))

    def _each(self, action: Callable[[Connection], None]) -> None:
        for connection in list(self._connections.values()):
            action(connection)

    def call_soon(self, function: Callable[[], None]) -> None:
        self._loop.call_threadsafe(function)

    def check_time(self) -> None:
        if self.clients:
            self.each(lambda connection: connection.check_time(time.monotonic()))

    def stop(self) -> None:
        """End the thread after the functions that it was given."""
        self._loop.call_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

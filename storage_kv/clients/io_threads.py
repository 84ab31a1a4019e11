"""The threads that serve clients, so that one core is not the ceiling of a server that mostly copies into sockets.

Some facts. Sending and receiving a large value is one system call after another, for which Python lets go of its
interpreter lock: in a GET of 2 MiB, about nine tenths of the time. Commands themselves take microseconds. So event
loops in threads share the copying among cores, and commands are executed one at a time, under the node's lock.
Processes would need the values in shared memory and a protocol between them for the same gain.

A connection belongs to one thread for its life: everything that it does is done there. The main thread accepts, keeps
time and stops; it passes the word on with :meth:`IoThread.each`.
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
    """Return how many threads to start: as many as configured or, for 0, half of this process's cores, at most four."""
    return configured or max(1, min(_AUTOMATIC_MAX, len(os.sched_getaffinity(0)) // 2))


class IoThread:
    """A thread with an event loop, and the connections that it drives.

    Attributes:
        node: the node that they serve.
        workers: threads for work that is too long for an event loop.
        clients: connections given to it that have not ended; read and changed with the node's lock held.
    """

    def __init__(self, number: int, node: Node, workers: Workers, on_forgotten: Callable[[], None]) -> None:
        """Start thread ``number``; ``stop()`` ends it.

        Args:
            number: for its name.
            node: the node to serve.
            workers: threads for work that is too long for an event loop.
            on_forgotten: called in this thread after a connection's end.

        Raises:
            OSError: no descriptors or threads are left.
        """
        self.node = node
        self.workers = workers
        self.clients = 0
        self._on_forgotten = on_forgotten
        self._connections: dict[Session, Connection] = {}
        self._loop = EventLoop()
        # A daemon, so that an error in the main thread ends the process and not only the accepting.
        self._thread = threading.Thread(target=self._loop.run, name=f"io-{number}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loop.close()
            raise OSError(str(error)) from error

    def adopt(self, transport: Transport, session: Session) -> None:
        """Serve a new client, already counted in ``clients``, from its non-blocking socket until its end."""
        self._loop.call_threadsafe(lambda: self._adopt(transport, session))

    def _adopt(self, transport: Transport, session: Session) -> None:
        kind = SecureConnection if transport.is_secure else Connection
        self._connections[session] = kind(self, transport, session, self._loop)

    def each(self, action: Callable[[Connection], None]) -> None:
        """Have ``action`` done with every connection, soon, in this thread."""
        self._loop.call_threadsafe(lambda: self._each(action))

    def hand(self, function: Callable[[], None]) -> None:
        """Have a function called soon, in this thread."""
        self._loop.call_threadsafe(function)

    def watch(self) -> None:
        """Have connections ended that have stood still for too long."""
        if self.clients:
            self.each(lambda connection: connection.check_time(time.monotonic()))

    def stop(self) -> None:
        """End the thread when it has done everything that it was asked for."""
        self._loop.call_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def forget(self, session: Session) -> None:
        """Take note that a client's connection has ended."""
        self._connections.pop(session, None)
        with self.node.lock:
            self.clients -= 1
            self.node.sessions.pop(session.id, None)
            self.node.places.leave(session)
        self._on_forgotten()

    def _each(self, action: Callable[[Connection], None]) -> None:
        for connection in list(self._connections.values()):
            action(connection)

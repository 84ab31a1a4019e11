"""A proxy between client and server that simulates network faults on connections."""

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Final

_PIECE: Final = 64 << 10


class Proxy:
    """Forwards TCP connections to a port of loopback. Its faults can change at any time.

    Attributes:
        silent: Forwards no bytes in either direction and does not close: a half-open connection.
        flip_one_in: Average number of pieces for one inverted bit; 0 for no faults.
        flips: Direction of the faults: "up" (to the server), "down", or "both".
        flipped: Number of inverted bits.
        bytes_per_s: Rate limit of each direction of each connection; 0 for no limit.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self.target = target
        self.silent = False
        self.flip_one_in = 0
        self.flips = "both"
        self.flipped = 0
        self.bytes_per_s = 0
        self._chance = random.Random(seed)
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        self._listener.settimeout(0.2)
        while not self._stopped.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            except OSError:
                client.close()
                continue
            self._sockets |= {client, server}
            thread = threading.Thread(target=self._forward, args=(client, server), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Forward bytes in both directions until one side ends or this proxy ends."""
        other = {client: server, server: client}
        try:
            while not self._stopped.is_set():
                readable = select.select([client, server], [], [], 0.1)[0]
                if self.silent:
                    self._stopped.wait(0.05)
                    continue
                for sock in readable:
                    data = sock.recv(_PIECE if not self.bytes_per_s else max(1, self.bytes_per_s // 20))
                    if not data:
                        return
                    self._send(other[sock], self._harmed(data, "up" if sock is client else "down"))
        except OSError:
            pass
        finally:
            for sock in (client, server):
                sock.close()
                self._sockets.discard(sock)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        sock.settimeout(1.0)
        view = memoryview(data)
        while view and not self._stopped.is_set():
            with contextlib.suppress(TimeoutError):
                view = view[sock.send(view) :]
        if self.bytes_per_s:
            time.sleep(len(data) / self.bytes_per_s)

    def _harmed(self, data: bytes, direction: str) -> bytes:
        if not self.flip_one_in or self.flips not in (direction, "both"):
            return data
        if self._chance.randrange(self.flip_one_in):
            return data
        harmed = bytearray(data)
        harmed[self._chance.randrange(len(harmed))] ^= 1 << self._chance.randrange(8)
        self.flipped += 1
        return bytes(harmed)

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Forward nothing until the context ends."""
        self.silent = True
        yield
        self.silent = False

    def cut(self) -> None:
        """Reset all connections."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stopped.set()
        self._listener.close()
        self.cut()
        for thread in list(self._threads):
            thread.join(10)

"""A program that only sends: the limit of every transfer over TCP.

``python -m shadowserve_tools.bench.parts.plain_sender HOST WAY MIB`` has MIB mebibytes in memory, and with ``FILE
CHUNKS`` in place of MIB the chunks of :class:`~shadowserve_tools.bench.peers.driver.Values`. It prints ``ready
HOST:PORT``, and sends the bytes at each requested place. WAY is ``blocking`` (one call, in which the kernel waits for
space with the connection locked) or ``polled`` (a call for as much as fits, like an event loop). Either may be faster.
"""

import select
import socket
import struct
import sys
import threading

import numpy as np

from shadowserve.pool.buffers import allocate
from shadowserve_tools.bench.peers.driver import Values
from shadowserve_tools.processes import Child, Programs, started

_REQUEST = struct.Struct("<QQ")


def plain_request(begin: int, size: int) -> bytes:
    """Return the request for ``size`` bytes from ``begin`` on."""
    return _REQUEST.pack(begin, size)


def sender_command(host: str, way: str, *contents: object) -> list[str]:
    """Return the command that runs this program."""
    return [sys.executable, "-m", __name__, host, way, *map(str, contents)]


def start_sender(programs: Programs, mebibytes: int, way: str = "blocking") -> Child:
    """Run this program on loopback, with this number of mebibytes."""
    command = sender_command("127.0.0.1", way, mebibytes)
    return programs.enter_context(started(f"plain_sender-{way}", command, programs.logs))


def _send_polled(sock: socket.socket, data: memoryview) -> None:
    room = select.poll()
    room.register(sock, select.POLLOUT)
    while data:
        try:
            data = data[sock.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            room.poll()


def _serve(sock: socket.socket, values: memoryview, way: str) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    send = _send_polled if way == "polled" else socket.socket.sendall
    with sock:
        while request := sock.recv(_REQUEST.size, socket.MSG_WAITALL):
            begin, size = _REQUEST.unpack(request)
            send(sock, values[begin : begin + size])


def _contents(source: str, chunks: int) -> memoryview:
    """Return the bytes to send, all of them touched."""
    if source.isdigit():
        memory = allocate(int(source) << 20)
        for begin in range(0, len(memory), 1 << 20):
            memory[begin : begin + (1 << 20)] = bytes([begin >> 20 & 0xFF]) * (1 << 20)
        return memory
    values = Values(source)
    memory = allocate(chunks * values.chunk_bytes)
    for index, row in enumerate(np.frombuffer(memory, np.uint8).reshape(chunks, -1)):
        values.write(index, row)
    return memory


def _main(host: str, way: str, source: str, chunks: str = "0") -> None:
    values = _contents(source, int(chunks))
    with socket.create_server((host, 0)) as listener:
        print(f"ready {host}:{listener.getsockname()[1]}", flush=True)
        while True:
            threading.Thread(target=_serve, args=(listener.accept()[0], values, way), daemon=True).start()


if __name__ == "__main__":
    _main(*sys.argv[1:])

"""A program that only sends: the limit of the kernel's sockets.

``python -m shadowserve_tools.bench.parts.plain_sender MIB WAY`` listens on a port of loopback and prints ``ready
HOST:PORT``. A client sends a size in 16 characters, and receives that many bytes of a ring of MIB mebibytes. WAY is
``blocking`` (one call, in which the kernel waits for space with the connection locked) or ``polled`` (a call for as
much as fits, like an event loop). Either may be the faster one.
"""

import select
import socket
import sys
import threading

from shadowserve.pool.buffers import allocate
from shadowserve_tools.processes import Child, Programs, started

REQUEST_BYTES = 16


def start_sender(programs: Programs, mebibytes: int, way: str = "blocking") -> Child:
    """Run this program."""
    command = [sys.executable, "-m", __name__, str(mebibytes), way]
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
    position = 0
    send = _send_polled if way == "polled" else socket.socket.sendall
    with sock:
        while request := sock.recv(REQUEST_BYTES, socket.MSG_WAITALL):
            size = int(request)
            if position + size > len(values):
                position = 0
            send(sock, values[position : position + size])
            position += size


def _main() -> None:
    values = allocate(int(sys.argv[1]) << 20)
    for begin in range(0, len(values), 1 << 20):
        values[begin : begin + (1 << 20)] = bytes([begin >> 20 & 0xFF]) * (1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"ready 127.0.0.1:{listener.getsockname()[1]}", flush=True)
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=_serve, args=(sock, values, sys.argv[2]), daemon=True).start()


if __name__ == "__main__":
    _main()

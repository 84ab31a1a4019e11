"""``shadowserve.tls.diagnose`` against servers that differ from a client's configuration."""

import gc
import select
import socket
import struct
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from machine import WAIT_MAX_S

from shadowserve.tls import diagnose

RESET = struct.pack("ii", 1, 0)
"""``SO_LINGER`` with time 0: ``close`` resets the connection."""


@pytest.fixture
def resetting_port() -> Iterator[int]:
    """Port of a server that resets every connection at once."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(WAIT_MAX_S)


def test_a_connection_reset_before_the_handshake_leaves_no_open_socket(
    resetting_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.create_connection

    def connect_and_be_reset(*arguments: Any, **options: Any) -> socket.socket:
        connection = connect(*arguments, **options)
        poll = select.poll()
        poll.register(connection, select.POLLERR | select.POLLHUP)
        assert poll.poll(1000 * WAIT_MAX_S)
        return connection

    monkeypatch.setattr(socket, "create_connection", connect_and_be_reset)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        assert diagnose("127.0.0.1", resetting_port, None, WAIT_MAX_S) == ""
        gc.collect()
    assert not [str(each.message) for each in caught]

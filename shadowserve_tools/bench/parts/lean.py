"""Connections that receive into prepared memory: the lowest cost of a client."""

import socket
import struct
from typing import Final

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve.keys import storage_key
from shadowserve.pool.buffers import allocate
from shadowserve.resp import encode_array_header, encode_bulk_header, encode_command

_RECEIVED_BYTES: Final = 4 << 20
"""Size of a receive buffer that all answers use, like the buffers of a data plane."""
_TIMEOUT_S: Final = 60.0


def connect(address: str) -> socket.socket:
    """Return a connection to ``host:port`` that sends without delay, and receives within a minute."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), _TIMEOUT_S)
    # Python's timeouts make sockets non-blocking, which costs a poll() for each call.
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(_TIMEOUT_S), 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def receive(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view``."""
    while view:
        try:
            received = connection.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise ShadowServeError(f"the server owes {len(view)} bytes and is silent") from error
        if not received:
            raise ShadowServeError(f"the server closed the connection with {len(view)} bytes to come")
        view = view[received:]


class LeanSocket:
    """A connection to the storage node at ``host:port``."""

    def __init__(self, address: str) -> None:
        self.socket = connect(address)
        self._memory = allocate(_RECEIVED_BYTES)

    def __enter__(self) -> "LeanSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def receive(self, size: int) -> memoryview:
        view = self._memory[:0]
        while size > 0:
            view = self._memory[: min(size, _RECEIVED_BYTES)]
            receive(self.socket, view)
            size -= len(view)
        return view

    def call(self, *command: str | bytes | int) -> None:
        """Send a command whose answer is OK."""
        self.socket.sendall(encode_command(*command))
        answer = bytes(self.receive(5))
        if answer != b"+OK\r\n":
            raise ShadowServeError(f"storage refused {command[0]!r}: {answer!r}...")


def plain_record(name: bytes, *, layers: int, tokens: int, token_bytes: int) -> tuple[bytes, bytes]:
    """Return key and record of a chunk of one value. ``name`` has 32 bytes; ``token_bytes``, even, are of a layer."""
    layout = ChunkLayout(
        namespace=bytes(32), dtype=DType.UINT8, layers=layers, kinds=2, vector_length=token_bytes // 2, tokens=tokens,
        quantizer=Quantizer.PASSTHROUGH,
    )  # fmt: skip
    fill = bytes([sum(name) % 256])
    return storage_key(name), record.encode(name, native.Codec.NONE, layout, fill * layout.raw_bytes)


def answer_lengths(layers: int, pieces: list[int]) -> list[int]:
    """Return the bytes of the answer to KV.LAYERS for chunks of these piece sizes: header, then each layer."""
    head = encode_array_header(1 + layers) + encode_array_header(len(pieces))
    sizes = [len(b":%d\r\n" % (layers * piece)) for piece in pieces]
    bulk = 4 * len(pieces) + sum(pieces)
    return [len(head) + sum(sizes), *[len(encode_bulk_header(bulk)) + bulk + 2] * layers]

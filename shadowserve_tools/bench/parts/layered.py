"""Records with synthetic bytes in a storage node, and a client that receives answers at the lowest cost."""

import socket
from collections.abc import Iterable
from typing import Final

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import ShadowServeError
from shadowserve.keys import storage_key
from shadowserve.pool.buffers import allocate
from shadowserve.resp import encode_array_header, encode_bulk_header, encode_command

_RECEIVED_BYTES: Final = 4 << 20
"""Size of the receive buffer. All answers use the same memory, like the buffers of a data plane."""
_TIMEOUT_S: Final = 60.0


def plain_record(name: bytes, *, layers: int, tokens: int, token_bytes: int) -> tuple[bytes, bytes]:
    """Return key and record of a chunk: ``token_bytes`` (even) for each token and layer, all of one value.

    Args:
        name: 32 bytes.
        layers: Layers of the record.
        tokens: Tokens of the chunk.
        token_bytes: Bytes of keys and values together.
    """
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


class LeanSocket:
    """A connection that receives into prepared memory."""

    def __init__(self, address: str) -> None:
        """Connect to ``host:port``."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=_TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = allocate(_RECEIVED_BYTES)

    def receive(self, size: int) -> memoryview:
        """Receive ``size`` bytes and return the last part of them.

        Raises:
            ShadowServeError: The server closed the connection, or sent nothing for a minute.
        """
        view = self._memory[:0]
        while size > 0:
            view = self._memory[: min(size, _RECEIVED_BYTES)]
            taken = 0
            while taken < len(view):
                try:
                    got = self.socket.recv_into(view[taken:], 0, socket.MSG_WAITALL)
                except TimeoutError as error:
                    raise ShadowServeError(f"storage owes {size - taken} bytes and is silent") from error
                if not got:
                    raise ShadowServeError(f"storage closed the connection with {size - taken} bytes to come")
                taken += got
            size -= taken
        return view

    def store(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        """Store records one after the other."""
        for key, value in records:
            self.call("SET", key, value)

    def call(self, *command: str | bytes | int) -> None:
        """Send a command whose answer is OK."""
        self.socket.sendall(encode_command(*command))
        answer = bytes(self.receive(5))
        if answer != b"+OK\r\n":
            raise ShadowServeError(f"storage refused {command[0]!r}: {answer!r}...")

    def __enter__(self) -> "LeanSocket":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

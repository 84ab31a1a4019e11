"""TLS on the connections to storage. It is in the C core because the received bytes never pass through Python."""

import enum
from typing import TYPE_CHECKING, Any, Final

from shadowserve.errors import NativeError
from shadowserve.native._library import Owner, Result, ffi, lib

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["Tls", "TlsSession", "TlsWant", "tls_library"]

_ERROR_TEXT_SIZE: Final = 512
_POLL_IN: Final = 1
_POLL_OUT: Final = 4


class TlsWant(enum.Enum):
    """Event that a step of a session waits for."""

    NOTHING = 0
    READ = 1
    WRITE = 2


_WANTS: Final = {0: TlsWant.NOTHING, _POLL_IN: TlsWant.READ, _POLL_OUT: TlsWant.WRITE}


def tls_library() -> str:
    """Return the TLS library and its version; empty if this build of the C core has none."""
    text = lib.ss_tls_library()
    return "" if text == ffi.NULL else str(ffi.string(text).decode())


class Tls(Owner):
    """TLS context: the trusted authorities and the own certificate, for any number of sessions (``struct ss_tls``).

    All are PEM files; without ``certificate`` the client has none. NativeError with ``Result.NOT_SUPPORTED``: this
    build has no TLS; with ``Result.BAD_DATA``: a file is not usable.
    """

    destructor = "ss_tls_destroy"

    def __init__(self, authorities: str, certificate: str = "", key: str = "") -> None:
        error = ffi.new("char[]", _ERROR_TEXT_SIZE)
        own = [file.encode() if file else ffi.NULL for file in (certificate, key)]

        def make(pointer: Any) -> int:
            code = lib.ss_tls_create(authorities.encode(), *own, pointer, error, _ERROR_TEXT_SIZE)
            if code == Result.BAD_DATA:
                raise NativeError(f"TLS with authorities {authorities}: {ffi.string(error).decode()}", code)
            return code

        super().__init__("ss_tls", make, "making a TLS context")


class TlsSession(Owner):
    """TLS session on one connected, non-blocking socket of the caller (``struct ss_tls_session``).

    The methods below never block. Each returns the event that it waits for. Call it again with the same arguments when
    the socket is ready. Only one thread at a time may use a session. The caller keeps the socket open until
    :meth:`close`, which sends close_notify if the socket has room. The server's certificate must have ``name``, a host
    name or an IP address.
    """

    destructor = "ss_tls_session_destroy"

    def __init__(self, tls: Tls, socket: int, name: str) -> None:
        def make(pointer: Any) -> int:
            return int(lib.ss_tls_session_create(tls._object, socket, name.encode(), pointer))

        super().__init__("ss_tls_session", make, f"beginning TLS with {name}")

    @property
    def handle(self) -> Any:
        return self._object

    @property
    def has_pending(self) -> bool:
        return bool(lib.ss_tls_has_pending(self._object))

    @property
    def reason(self) -> str:
        """Reason of the session's end; empty while it is open."""
        return str(ffi.string(lib.ss_tls_reason(self._object)).decode("utf-8", "replace"))

    def handshake(self) -> tuple[Result, TlsWant]:
        """Continue the handshake; ``Result.OK`` and ``TlsWant.NOTHING`` when it is complete."""
        events = ffi.new("uint32_t *")
        result = lib.ss_tls_handshake(self._object, events)
        return Result(result), _WANTS[events[0]]

    def send(self, data: "ReadableBuffer") -> tuple[Result, TlsWant, int]:
        """Send bytes without blocking; the last item of the result is the number of bytes sent."""
        events, sent = ffi.new("uint32_t *"), ffi.new("size_t *")
        with ffi.from_buffer("uint8_t[]", data) as memory:
            result = lib.ss_tls_send(self._object, memory, len(memory), sent, events)
        return Result(result), _WANTS[events[0]], int(sent[0])

    def receive(self, size: int) -> tuple[Result, TlsWant, bytes]:
        """Receive up to ``size`` available bytes."""
        data = bytearray(size)
        result, want, received = self.receive_into(data)
        return result, want, bytes(data[:received])

    def receive_into(self, memory: "WriteableBuffer") -> tuple[Result, TlsWant, int]:
        """Receive available bytes into memory; the last item of the result is their number."""
        events, received = ffi.new("uint32_t *"), ffi.new("size_t *")
        with ffi.from_buffer("uint8_t[]", memory, require_writable=True) as room:
            result = lib.ss_tls_receive(self._object, room, len(room), received, events)
        return Result(result), _WANTS[events[0]], int(received[0])

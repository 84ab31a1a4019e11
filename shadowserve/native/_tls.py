"""TLS on the connections that bytes from storage come over: in the C core, since Python never sees those bytes."""

import enum
from typing import TYPE_CHECKING, Any, Final

from shadowserve.errors import NativeError
from shadowserve.native._library import Result, check, ffi, lib

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["Tls", "TlsSession", "TlsWant", "tls_library"]

_ERROR_TEXT_SIZE: Final = 512
_POLL_IN: Final = 1
_POLL_OUT: Final = 4


class TlsWant(enum.Enum):
    """What a step of a session waits for."""

    NOTHING = 0
    READ = 1
    WRITE = 2


_WANTS: Final = {0: TlsWant.NOTHING, _POLL_IN: TlsWant.READ, _POLL_OUT: TlsWant.WRITE}


def tls_library() -> str:
    """Return the library that does it and its version; empty where this build of the C core has none."""
    text = lib.ss_tls_library()
    return "" if text == ffi.NULL else str(ffi.string(text).decode())


class Tls:
    """Whom to trust, and what to show: made once, for any number of sessions (``struct ss_tls``).

    Args:
        authorities: file of certificates, PEM.
        certificate, key: files, PEM; empty for a client that shows none.

    Raises:
        NativeError: ``Result.NOT_SUPPORTED`` where this build has no TLS, ``Result.BAD_DATA`` for a file that cannot be
            used.
    """

    def __init__(self, authorities: str, certificate: str = "", key: str = "") -> None:
        self._tls: Any = ffi.NULL
        pointer = ffi.new("struct ss_tls **")
        error = ffi.new("char[]", _ERROR_TEXT_SIZE)
        code = Result(
            lib.ss_tls_create(
                authorities.encode(),
                certificate.encode() if certificate else ffi.NULL,
                key.encode() if key else ffi.NULL,
                pointer,
                error,
                _ERROR_TEXT_SIZE,
            )
        )
        if code is Result.BAD_DATA:
            raise NativeError(f"TLS with authorities {authorities}: {ffi.string(error).decode()}", code)
        check(code, "making a TLS context")
        self._tls = pointer[0]

    def __del__(self) -> None:
        tls, self._tls = self._tls, ffi.NULL
        if tls != ffi.NULL:
            lib.ss_tls_destroy(tls)


class TlsSession:
    """TLS on one connected, non-blocking socket, which stays the caller's (``struct ss_tls_session``).

    The steps below never block: each returns what it waits for, and is called again, with the same arguments, once the
    socket is ready for that. One thread at a time uses a session.

    Args:
        tls: whom to trust.
        socket: its file descriptor, open until :meth:`close`.
        name: that the server's certificate must hold, a host name or an IP address.

    Raises:
        NativeError: no memory, or a name that cannot be one.
    """

    def __init__(self, tls: Tls, socket: int, name: str) -> None:
        self._session: Any = ffi.NULL
        pointer = ffi.new("struct ss_tls_session **")
        check(lib.ss_tls_session_create(tls._tls, socket, name.encode(), pointer), f"beginning TLS with {name}")
        self._session = pointer[0]

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Say farewell, if there is room for it, and forget the session. The socket stays open. Twice is harmless."""
        session, self._session = self._session, ffi.NULL
        if session != ffi.NULL:
            lib.ss_tls_session_destroy(session)

    @property
    def handle(self) -> Any:
        """What the pipeline takes."""
        return self._session

    @property
    def has_pending(self) -> bool:
        """Whether bytes have arrived that nobody has read."""
        return bool(lib.ss_tls_has_pending(self._session))

    @property
    def reason(self) -> str:
        """Why the session is over; empty while it is not."""
        return str(ffi.string(lib.ss_tls_reason(self._session)).decode("utf-8", "replace"))

    def handshake(self) -> tuple[Result, TlsWant]:
        """Go on with the handshake; ``Result.OK`` and ``TlsWant.NOTHING`` once it is done."""
        events = ffi.new("uint32_t *")
        result = lib.ss_tls_handshake(self._session, events)
        return Result(result), _WANTS[events[0]]

    def send(self, data: "ReadableBuffer") -> tuple[Result, TlsWant, int]:
        """Send what is taken now; also how many bytes that were."""
        events, sent = ffi.new("uint32_t *"), ffi.new("size_t *")
        with ffi.from_buffer("uint8_t[]", data) as memory:
            result = lib.ss_tls_send(self._session, memory, len(memory), sent, events)
        return Result(result), _WANTS[events[0]], int(sent[0])

    def receive(self, size: int) -> tuple[Result, TlsWant, bytes]:
        """Receive up to ``size`` bytes of what there is."""
        data = bytearray(size)
        result, want, received = self.receive_into(data)
        return result, want, bytes(data[:received])

    def receive_into(self, memory: "WriteableBuffer") -> tuple[Result, TlsWant, int]:
        """Fill memory from its beginning with what there is; also how many bytes that were."""
        events, received = ffi.new("uint32_t *"), ffi.new("size_t *")
        with ffi.from_buffer("uint8_t[]", memory, require_writable=True) as room:
            result = lib.ss_tls_receive(self._session, room, len(room), received, events)
        return Result(result), _WANTS[events[0]], int(received[0])

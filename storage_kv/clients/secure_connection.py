"""A client's connection through TLS: the handshake, and waiting for the other direction.

A handshake is driven by readiness like everything else, and has ``authentication_timeout_s`` in all. Later, reading may
have to wait for room to write and the reverse, and bytes that are decrypted already are published by nobody.
"""

import contextlib
import socket
import ssl
import time
from typing import Final

from shadowserve.resp import encode_error
from storage_kv.clients.acceptor import Acceptor
from storage_kv.clients.connection import Connection
from storage_kv.clients.event_loop import READ, WRITE, EventLoop
from storage_kv.clients.requests import limits_of
from storage_kv.clients.transport import PlainClientError, Transport
from storage_kv.session import Session

_TLS_ONLY: Final = encode_error("ERR this server speaks TLS only: connect with TLS (redis-cli --tls)")

_REASONS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client shows no certificate, and tls_client_ca wants one",
    "UNSUPPORTED_PROTOCOL": "the client's newest TLS is older than 1.2",
    "NO_SHARED_CIPHER": "the client and this server have no cipher in common",
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not trust this server's certificate: give it the authority's",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client does not accept this server's certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client does not accept this server's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client finds this server's certificate expired: renew it",
}
"""OpenSSL's reasons, those that are worth translating."""


class SecureConnection(Connection):
    """A connection that begins with a handshake."""

    __slots__ = ("_shaking_hands", "_wanted")

    def __init__(self, acceptor: Acceptor, transport: Transport, session: Session, loop: EventLoop) -> None:
        self._shaking_hands = True
        self._wanted = 0  # what the connection waits for; what its socket does may be the other direction
        super().__init__(acceptor, transport, session, loop)

    def _on_event(self, events: int) -> None:
        """Do what the connection waits for; what cannot be done yet shows when it is tried."""
        wanted = self._wanted
        if self._shaking_hands:
            self._guarded(self._shake_hands)
            return
        if wanted & READ:
            self._guarded(self._on_lingering if self._lingering else self._on_readable)
        if wanted & WRITE and not self._closed:
            self._guarded(self._on_writable)

    def _update_interest(self) -> None:
        transport = self._transport
        self._wanted = wanted = self._interest_now()
        if self._shaking_hands:
            self._watch(WRITE if transport.read_wants_write else READ)
            return
        if wanted & READ and not self._scheduled and transport.pending():
            self._scheduled = True
            self._loop.call_soon(self._take_turn, self._lane)
        crossed = WRITE if wanted & READ and transport.read_wants_write else 0
        self._watch(wanted | crossed | (READ if wanted & WRITE and transport.write_wants_read else 0))

    def _after_step(self) -> None:
        super()._after_step()
        if not self._closed:  # what is waited for may be the same, and the transport's direction another
            self._update_interest()

    def _take_turn(self) -> None:
        if self._more or not (self._wanted & READ and self._transport.pending()):
            super()._take_turn()
            return
        self._scheduled = False
        if not self._closed:
            self._guarded(self._on_lingering if self._lingering else self._on_readable)
        if not self._closed and not self._lingering:
            self._guarded(self._after_step)  # not in the next turn, before which there may be events

    def _shake_hands(self) -> None:
        try:
            over = self._transport.shake_hands()
        except PlainClientError:
            self._fail("the client does not speak TLS", _TLS_ONLY)
            return
        except OSError as error:
            self._fail(_reason(error))
            return
        if over:
            self._shaking_hands = False
            self._last_progress_s = time.monotonic()
            name = self._transport.user_name() if self._node.config.tls_users == "cn" else ""
            if name:
                with self._node.lock:
                    self._node.admit_by_certificate(self.session, name)
                    self._reader.limits = limits_of(self._node, self.session)
        self._update_interest()

    def _fail(self, reason: str, answer: bytes = b"") -> None:
        """Count it, tell of it where it is news, send ``answer`` in the clear, if any, and end."""
        node = self._node
        with node.lock:
            node.counters.tls_failures += 1
            node.tell("tls_failed", self.session.address, reason)
            node.audit.write("tls", self.session, outcome="failed", reason=reason)
        self.session.closing = True
        self._shaking_hands = False
        with contextlib.suppress(OSError):
            if answer:  # past TLS, into an empty buffer of the kernel's
                socket.socket.send(self._socket, answer)
        self._linger()  # so that the client sees the answer, or the alert that OpenSSL has sent

    def finish(self) -> None:
        """Execute nothing more; end when what is under way has been answered and sent."""
        if self._shaking_hands:
            self.abort()
        else:
            super().finish()

    def check_time(self, now_s: float) -> None:
        """End the connection if it has stood still for longer than the configuration allows."""
        if not self._shaking_hands:
            super().check_time(now_s)
        elif now_s - self.session.created_s > self._node.config.authentication_timeout_s:
            self._fail("the client has not finished the handshake in time")


def _reason(error: OSError) -> str:
    """Return in words why a handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError | ConnectionError):
        return "the client has hung up"
    reason = str(getattr(error, "reason", "") or "")
    return _REASONS.get(reason, reason.lower().replace("_", " ") or str(error))

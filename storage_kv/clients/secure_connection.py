"""A client's connection through TLS: the handshake, and reads and writes that wait for the other direction.

The kernel does not report decrypted bytes that wait in OpenSSL.
"""

import contextlib
import socket
import ssl
import time
from typing import ClassVar, Final

from shadowserve.resp import encode_error
from storage_kv.clients.connection import CLOSED, HANDSHAKE, LINGERING, OPEN, Connection, Phase
from storage_kv.clients.event_loop import READ, WRITE
from storage_kv.clients.request_body import limits_of
from storage_kv.clients.transport import PlainClientError, TlsTransport

_TLS_ONLY: Final = encode_error("ERR this server speaks TLS only: connect with TLS (redis-cli --tls)")

_REASONS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client has sent no certificate, and tls_client_ca requires one",
    "UNSUPPORTED_PROTOCOL": "the client's newest TLS is older than 1.2",
    "NO_SHARED_CIPHER": "the client and this server have no cipher in common",
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not trust this server's certificate: give the client the CA file",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client does not accept this server's certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client does not accept this server's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this server's certificate has expired: renew it",
}
"""OpenSSL's reasons in plain words."""


class SecureConnection(Connection):
    """A connection that begins with a handshake."""

    _transport: TlsTransport

    first_phase: ClassVar[Phase] = HANDSHAKE

    def _on_event(self, events: int) -> None:
        """Read and write as wanted, whatever the event; a call that would block says so."""
        wanted = self._wanted
        if self._phase is HANDSHAKE:
            self._guarded(self._continue_handshake)
            return
        if wanted & READ:
            self._guarded(self._on_lingering if self._phase is LINGERING else self._on_readable)
        if wanted & WRITE and self._phase is not CLOSED:
            self._guarded(self._on_writable)

    def _update_interest(self) -> None:
        transport = self._transport
        self._wanted = wanted = self._interest_now()
        if self._phase is HANDSHAKE:
            self._watch(WRITE if transport.read_wants_write else READ)
            return
        if wanted & READ and not self._is_turn_scheduled and transport.pending():
            self._is_turn_scheduled = True
            self._loop.call_soon(self._run_scheduled_turn, self._lane)
        crossed = WRITE if wanted & READ and transport.read_wants_write else 0
        self._watch(wanted | crossed | (READ if wanted & WRITE and transport.write_wants_read else 0))

    def _send_and_wait(self) -> None:
        super()._send_and_wait()
        if self._phase is not CLOSED:  # the wanted directions may be the same, and the transport's another
            self._update_interest()

    def _run_scheduled_turn(self) -> None:
        if self._executor.has_input or not (self._wanted & READ and self._transport.pending()):
            super()._run_scheduled_turn()
            return
        self._is_turn_scheduled = False
        if self._phase is not CLOSED:
            self._guarded(self._on_lingering if self._phase is LINGERING else self._on_readable)
        if self._phase is OPEN:
            self._guarded(self._send_and_wait)  # at once: events may come before the next turn

    def _continue_handshake(self) -> None:
        try:
            is_done = self._transport.shake_hands()
        except PlainClientError:
            self._fail_handshake("the client does not speak TLS", _TLS_ONLY)
            return
        except OSError as error:
            self._fail_handshake(_reason(error))
            return
        if is_done:
            self._phase = OPEN
            self.session.info.last_active_s = time.monotonic()
            name = self._transport.user_name() if self._node.config.tls_users == "cn" else ""
            if name:
                with self._node.lock:
                    self._node.admit_by_certificate(self.session, name)
                    self._executor.reader.limits = limits_of(self._node, self.session)
        self._update_interest()

    def _fail_handshake(self, reason: str, answer: bytes = b"") -> None:
        """Count and log the failure, send ``answer`` in the clear, and end."""
        node = self._node
        with node.lock:
            node.counters.tls_failures += 1
            node.warn_limited("tls_failed", self.session.address, reason)
            node.audit.write("tls", self.session, outcome="failed", reason=reason)
        self.session.closing = True
        self._phase = OPEN
        with contextlib.suppress(OSError):
            if answer:  # past OpenSSL, into an empty kernel buffer
                socket.socket.send(self._transport.socket, answer)
        self._linger()  # so that the client receives the answer, or the alert that OpenSSL has sent

    def finish(self) -> None:
        if self._phase is HANDSHAKE:
            self.abort()
        else:
            super().finish()

    def check_time(self, now_s: float) -> None:
        if self._phase is not HANDSHAKE:
            super().check_time(now_s)
        elif now_s - self.session.info.created_s > self._node.config.authentication_timeout_s:
            self._fail_handshake("the client has not finished the handshake in time")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLEOFError | ConnectionError):
        return "the client has disconnected"
    reason = str(getattr(error, "reason", "") or "")
    return _REASONS.get(reason, reason.lower().replace("_", " ") or str(error))

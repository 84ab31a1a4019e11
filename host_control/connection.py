"""One connection to a data plane: the channel, with TLS or without, Hello, and explanations of failures.

All other calls carry the session that Hello returns. Hello is due when the connection was lost, or when the data plane
does not know the session any more because it has restarted.
"""

import hashlib
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final

import grpc

from host_control.transfer import Reason
from shadowserve import __version__
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.keys import RECORD_VERSION, SCHEMA_VERSION
from shadowserve.proto import HELLO_KEY, PROTOCOL_VERSION, SESSION_KEY
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_message
from shadowserve.proto.dataplane_pb2_grpc import DataPlaneStub
from shadowserve.tls import Credentials, FileState, diagnose, file_state, read_authorities, read_key_pair

_MESSAGE_BYTES_MAX: Final = 8 << 20
_DETAIL_MAX: Final = 800
_PROCESS_ID: Final = secrets.token_hex(16)
_REFUSALS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}
_CHANNEL_OPTIONS: Final = (
    # gRPC's own backoff grows to two minutes; a data plane that is back should be found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time that one attempt to connect may take; a busy machine needs some.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
    # A network link that goes down sends nothing: without keepalive, TCP would wait minutes before it tries again.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two clients in one process (scheduler and worker) must not share a connection's fate.
    ("grpc.use_local_subchannel_pool", 1),
)


Peer = pb.HelloResponse
"""Description of a data plane: its answer to Hello."""


class Connection:
    """A gRPC channel and the session on it. Thread-safe.

    ``stub`` is for calls; it is a new one when certificates have changed.

    Raises:
        ConfigurationError: A certificate or key cannot be used.
    """

    def __init__(self, address: str, credentials: Credentials | None, engine: pb.Engine | None = None) -> None:
        self.address = address
        self._engine = engine
        self._credentials = credentials
        self._lock = threading.Lock()
        self._session = b""
        self._peer: Peer | None = None
        self._closed = False
        self._open()

    def _open(self) -> None:
        credentials = self._credentials
        options: list[tuple[str, str | int]] = list(_CHANNEL_OPTIONS)
        files = file_state(credentials.files) if credentials else ()
        if credentials is None:
            self._channel = grpc.insecure_channel(self.address, options)
        else:
            if credentials.server_name:
                options.append(("grpc.ssl_target_name_override", credentials.server_name))
            authorities = read_authorities("tls_ca", credentials.authorities)
            own: tuple[bytes | None, bytes | None] = (None, None)
            if credentials.certificate:
                pair = read_key_pair(credentials.certificate, credentials.key)
                own = (pair.key, pair.chain)
            secret = grpc.ssl_channel_credentials(authorities, *own)
            self._channel = grpc.secure_channel(self.address, secret, options)
        self.stub: Any = DataPlaneStub(self._channel)  # type: ignore[no-untyped-call]
        self._files: FileState = files

    def close(self) -> None:
        """End all calls."""
        self._closed = True
        self._channel.close()

    @property
    def peer(self) -> Peer | None:
        """Description of the data plane, None while not connected."""
        return self._peer

    def connect(self, timeout: float, shape: ChunkLayout | None, *, wait: bool) -> Peer:
        """Say Hello, and wait for the answer.

        Args:
            timeout: Seconds.
            shape: Layout of the chunks that will move, which the data plane checks; None where no chunks will.
            wait: Wait for a data plane that does not listen yet. Otherwise the first failure counts.

        Raises:
            DataPlaneError: No data plane answers (``unreachable``), TLS fails or the versions do not fit (``refused``).
        """
        self._renew()
        request = pb.HelloRequest(
            protocol_version=PROTOCOL_VERSION,
            version=__version__,
            record_version=RECORD_VERSION,
            key_schema=SCHEMA_VERSION,
            host=_host(),
            process=f"process {os.getpid()} on {socket.gethostname()}"[:256],
            layout=None if shape is None else layout_message(shape),
            chunk_bytes=0 if shape is None else shape.raw_bytes,
            session=self._session,
            engine=None if shape is None else self._engine,
        )
        ends = time.monotonic() + timeout
        try:
            # The first call does not wait: a call that waits learns no reason, and some failures do not go away.
            answer = self._hello(request, ends, wait=False)
        except DataPlaneError as error:
            if not wait or error.outcome != Reason.UNREACHABLE or time.monotonic() >= ends:
                raise
            answer = self._hello(request, ends, wait=True)
        with self._lock:
            if self._session == request.session:
                self._session, self._peer = answer.session, answer
                return answer
        # Another thread has opened a session meanwhile, and may have registered memory: continue that one.
        return self.connect(max(ends - time.monotonic(), 0.001), shape, wait=wait)

    def _hello(self, request: pb.HelloRequest, ends: float, *, wait: bool) -> pb.HelloResponse:
        try:
            # The rest of the time is for diagnosing a failure.
            left = max(ends - time.monotonic(), 0.001)
            answer: pb.HelloResponse = self.stub.Hello(request, timeout=left * 0.75, wait_for_ready=wait)
        except grpc.RpcError as error:
            raise self._not_connected(error, ends - time.monotonic()) from error
        except ValueError as error:
            raise DataPlaneError(
                f"the connection to the data plane {self.address} is closed", Reason.UNREACHABLE
            ) from error
        return answer

    def _renew(self) -> None:
        """Open a new channel where certificates have changed: gRPC's clients read them once."""
        if self._credentials is None or file_state(self._credentials.files) == self._files or self._closed:
            return
        with self._lock:
            try:
                self._open()  # calls in flight keep the old channel until they end
            except ConfigurationError as error:
                message = f"connecting to the data plane {self.address} failed: TLS: {error}"
                raise DataPlaneError(message, Reason.REFUSED) from error

    def _not_connected(self, error: Any, left: float) -> DataPlaneError:
        reason, detail = explain(error)
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            detail = f"it is of an older release than this host's {__version__}; install the same on both sides"
        elif reason != Reason.REFUSED:
            reason, host_port = Reason.UNREACHABLE, _host_port(self.address)
            if host_port is not None and (why := diagnose(*host_port, self._credentials, max(left, 0.05))):
                reason, detail = Reason.REFUSED, why
        if reason == Reason.UNREACHABLE:
            detail = f"no data plane answers ({detail}); start `shadowserve dpu` there"
        return DataPlaneError(f"connecting to the data plane {self.address} failed: {detail}", reason)

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((SESSION_KEY, self._session),)

    def lost(self, error: Any) -> bool:
        """Tell if a call failed because the data plane does not know the session; then Hello is due.

        Hello is due also after a connection broke: another data plane may answer the next one.
        """
        if not isinstance(error, grpc.Call):
            return False
        unknown = error.code() is grpc.StatusCode.FAILED_PRECONDITION and any(
            key == HELLO_KEY for key, _ in error.trailing_metadata() or ()
        )
        if unknown or error.code() is grpc.StatusCode.UNAVAILABLE:
            self._peer = None  # the session stays: memory that the data plane may still know is released with it
        return unknown


def _host() -> str:
    """Return a name of this machine until its next boot: containers on it share one data plane as one host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = _PROCESS_ID
    return hashlib.sha256(f"shadowserve host {boot}".encode()).hexdigest()[:32]


def _host_port(address: str) -> tuple[str, int] | None:
    """Return host and port of a TCP address, None for other addresses."""
    host, colon, port = address.removeprefix("dns:").rpartition(":")
    if not colon or not port.isdigit() or address.startswith("unix:"):
        return None
    return host.strip("/[]"), int(port)


def explain(error: BaseException) -> tuple[str, str]:
    """Return reason and detail of a call that ended without an answer."""
    if not isinstance(error, grpc.Call):
        return Reason.UNREACHABLE, str(error) or type(error).__name__
    code, detail = error.code(), str(error.details())[:_DETAIL_MAX]
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Reason.DEADLINE, "the data plane did not answer in time"
    if code in _REFUSALS:
        return Reason.REFUSED, f"{code.name}: {detail}"
    return Reason.UNREACHABLE, f"{code.name}: {detail}"

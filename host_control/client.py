"""The data plane's client: deadlines on every call, a breaker for each kind of call, and a reason for every failure.

What the daemon answers is checked before it is believed. A Fetch or Store that ends without an answer (the connection
broke, the deadline passed, the answer makes no sense) is not *quiet*: the daemon may still move bytes in the region, so
the caller must not use that memory again (:mod:`host_control.destination` retires it).
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import grpc

from shadowserve.errors import DataPlaneError
from shadowserve.proto import PROTOCOL_VERSION
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.dataplane_pb2_grpc import DataPlaneStub

__all__ = [
    "Breaker",
    "ChunkShape",
    "DataPlaneClient",
    "FetchAnswer",
    "FetchCall",
    "MemoryMessage",
    "Registration",
    "StoreAnswer",
]

_GRACE: Final = 0.25
"""Seconds that a call may outlast the deadline that the daemon was given: its answer is worth more than the time."""

_DTYPE_BYTES: Final = {"uint8": 1, "float8_e4m3": 1, "float16": 2, "bfloat16": 2, "float32": 4}
MemoryMessage = pb.SharedMemory | pb.ExportedMemory | pb.CudaIpcMemory
_MEMORY_FIELDS: Final[dict[type[Any], str]] = {
    pb.SharedMemory: "shared_memory",
    pb.ExportedMemory: "exported_memory",
    pb.CudaIpcMemory: "cuda_ipc",
}
_OPERATION = Literal["lookup", "fetch", "store", "register"]
_REFUSALS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.FAILED_PRECONDITION,
}
_AT_FAULT: Final = {
    "unreachable",
    "deadline",
    "refused",
    "invalid_answer",
    "storage_unavailable",
    "storage_refused",
    "internal",
    "device",
}
_CHANNEL_OPTIONS: Final = (
    # gRPC's own backoff grows to two minutes; a daemon that is back should be found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the time that one attempt to connect may take; a busy machine needs some.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.enable_http_proxy", 0),
    # Two clients in one process (scheduler and worker) must not share a connection's fate.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, kw_only=True)
class ChunkShape:
    """How one chunk lies in memory: layer, kind, token, head, dimension.

    Attributes:
        namespace: digest of the ``KVNamespace``, 32 bytes.
        dtype: ``"float16"``, ``"bfloat16"``, ``"float32"``, ``"float8_e4m3"`` or ``"uint8"``.
        layers: count.
        kinds: 2 for K and V, 1 for a latent.
        vector_length: elements of one token, layer and kind: KV heads x head size.
        chunk_tokens: count.
        quantizer: ``"lossless"``, ``"binned"`` or ``"passthrough"``.
        bins: of the binned quantizer, else 0.
        value_bins: those of V, where it has others than K, else 0.
        scale_tokens: tokens that share one scale of the binned quantizer, else 1.
    """

    namespace: bytes
    dtype: str
    layers: int
    kinds: int
    vector_length: int
    chunk_tokens: int
    quantizer: str
    bins: int = 0
    value_bins: int = 0
    scale_tokens: int = 1

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.layers * self.kinds * self.vector_length * self.chunk_tokens * _DTYPE_BYTES[self.dtype]

    def message(self) -> pb.ChunkLayout:
        """Return the message of the wire."""
        return pb.ChunkLayout(
            namespace=self.namespace,
            dtype=self.dtype,
            layers=self.layers,
            kinds=self.kinds,
            vector_length=self.vector_length,
            chunk_tokens=self.chunk_tokens,
            quantizer=self.quantizer,
            bins=self.bins,
            value_bins=self.value_bins,
            scale_tokens=self.scale_tokens,
        )


class Breaker:
    """Leaves a peer alone after repeated failures, and always tries again.

    Closed until ``failures`` calls in a row have failed; then open for ``backoff`` seconds, doubled with each further
    failure up to ``backoff_max``. When the time is over one call is let through as a probe: its success closes the
    breaker, its failure opens it again. A probe that never reports counts as lost after ``backoff_max`` more seconds.
    """

    def __init__(
        self, failures: int, backoff: float, backoff_max: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._failures_max = failures
        self._backoff = backoff
        self._backoff_max = backoff_max
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._closed_until_probe = 0.0

    def allow(self) -> bool:
        """Return whether a call may go out now; in the open state, ``True`` makes the caller the probe."""
        with self._lock:
            if self._failures < self._failures_max:
                return True
            now = self._clock()
            if now < self._closed_until_probe:
                return False
            self._closed_until_probe = now + self._backoff_max
            return True

    def report(self, success: bool) -> None:
        """Take the outcome of a call that :meth:`allow` let through."""
        with self._lock:
            if success:
                self._failures = 0
                return
            self._failures += 1
            excess = min(self._failures - self._failures_max, 16)
            if excess >= 0:
                self._closed_until_probe = self._clock() + min(self._backoff * 2.0**excess, self._backoff_max)

    @property
    def open(self) -> bool:
        """Whether calls are being turned away."""
        with self._lock:
            return self._failures >= self._failures_max


class Registration(NamedTuple):
    """What the daemon calls memory that it knows."""

    destination_id: int
    chunk_bytes: int


class FetchAnswer(NamedTuple):
    """Outcome of one round. ``quiet``: nobody writes into the region any more."""

    chunks: int
    reason: str
    detail: str
    quiet: bool
    fetched_bytes: int = 0
    delivered_bytes: int = 0


class StoreAnswer(NamedTuple):
    """Outcome of one Store. ``quiet``: nobody reads the region any more."""

    chunks: int
    reason: str
    detail: str
    quiet: bool
    raw_bytes: int = 0
    stored_bytes: int = 0


class FetchCall:
    """A Fetch on its way."""

    def __init__(self, call: Any, answer: Callable[[Any], FetchAnswer]) -> None:
        self._call = call
        self._answer = answer

    def on_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, in any thread, once the call has ended; at once if it has."""
        self._call.add_done_callback(lambda _: callback())

    def done(self) -> bool:
        """Return whether the call has ended."""
        return bool(self._call.done())

    def result(self) -> FetchAnswer:
        """Return the outcome, waiting for it at most until the call's own deadline."""
        return self._answer(self._call)


class DataPlaneClient:
    """Calls to one data plane. Thread-safe.

    Args:
        address: ``host:port`` or ``unix:/path``.
        connect_timeout: seconds for calls that move no KV.
        failures, backoff, backoff_max: see :class:`Breaker`.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_timeout: float = 2.0,
        failures: int = 3,
        backoff: float = 0.25,
        backoff_max: float = 5.0,
    ) -> None:
        self.address = address
        self._connect_timeout = connect_timeout
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._let_go_calls: set[Any] = set()
        self._stub: Any = DataPlaneStub(self._channel)  # type: ignore[no-untyped-call]
        self.breakers = {
            operation: Breaker(failures, backoff, backoff_max) for operation in ("lookup", "fetch", "store", "register")
        }

    def close(self) -> None:
        """End all calls."""
        self._channel.close()

    def lookup(self, chains: Sequence[tuple[bytes, Sequence[bytes]]], timeout: float) -> list[int]:
        """Return how many leading keys of each chain are stored.

        Args:
            chains: (namespace digest, keys) for each rank.
            timeout: seconds.

        Raises:
            DataPlaneError: no answer, or one that cannot be; ``outcome`` says which.
        """
        self._allow("lookup")
        request = pb.LookupRequest(
            chains=[pb.KeyChain(keys=keys, namespace=namespace) for namespace, keys in chains],
            timeout_ms=_milliseconds(timeout),
        )
        try:
            answer = self._stub.Lookup(request, timeout=timeout + _GRACE / 5)
        except grpc.RpcError as error:
            raise self._fail("lookup", *_explain(error)) from error
        reason = _reason(answer.outcome)
        if reason != "complete":
            raise self._fail("lookup", reason, answer.detail)
        hits = list(answer.hits)
        if len(hits) != len(chains) or any(n > len(keys) for n, (_, keys) in zip(hits, chains, strict=False)):
            raise self._fail("lookup", "invalid_answer", f"hits {hits[:8]} for {len(chains)} chains")
        self._report("lookup", reason)
        return hits

    def wait_ready(self, timeout: float) -> bool:
        """Return whether the data plane answers at all within ``timeout`` seconds; connects, where need be."""
        try:
            self._stub.Statistics(pb.StatisticsRequest(), timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            return _explain(error)[0] == "refused"
        except ValueError:  # the channel is closed
            return False
        return True

    def register(self, shape: ChunkShape, memory: MemoryMessage) -> Registration:
        """Make memory known to the data plane. The caller has asked the breaker.

        Raises:
            DataPlaneError: refused, unreachable, or the daemon counts another chunk size than we do.
        """
        request = pb.RegisterDestinationRequest(
            protocol_version=PROTOCOL_VERSION,
            layout=shape.message(),
            **{_MEMORY_FIELDS[type(memory)]: memory},  # type: ignore[arg-type]
        )
        try:
            answer = self._stub.RegisterDestination(request, timeout=self._connect_timeout)
        except grpc.RpcError as error:
            raise self._fail("register", *_explain(error)) from error
        if answer.chunk_bytes != shape.chunk_bytes:
            detail = f"the data plane counts {answer.chunk_bytes} bytes in a chunk, this host {shape.chunk_bytes}"
            raise self._fail("register", "invalid_answer", detail)
        self._report("register", "complete")
        return Registration(answer.destination_id, answer.chunk_bytes)

    def release(self, destination_id: int, *, wait: bool) -> bool:
        """Have the data plane forget memory; one that does not answer forgets it by itself, some time.

        Args:
            destination_id: of the memory.
            wait: for the answer, at most ``connect_timeout`` seconds.

        Returns:
            Whether it has answered, so that it will not touch the memory any more; always false without ``wait``.
        """
        request = pb.ReleaseDestinationRequest(destination_id=destination_id)
        try:
            call = self._stub.ReleaseDestination.future(request, timeout=self._connect_timeout)
            if wait:
                call.result()
                return True
            self._let_go(call)
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError):  # ValueError: the channel is closed
            pass
        return False

    def start_fetch(
        self, job_id: str, destination_id: int, offset: int, length: int, keys: Sequence[bytes], timeout: float
    ) -> FetchCall:
        """Start one round.

        Raises:
            DataPlaneError: the breaker is open.
        """
        self._allow("fetch")
        request = pb.FetchRequest(
            job_id=job_id,
            destination_id=destination_id,
            offset=offset,
            length=length,
            keys=keys,
            timeout_ms=_milliseconds(timeout),
        )
        call = self._stub.Fetch.future(request, timeout=timeout + _GRACE)
        return FetchCall(call, lambda ended: self._fetch_answer(ended, len(keys)))

    def _fetch_answer(self, call: Any, asked: int) -> FetchAnswer:
        try:
            answer = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            reason, detail = _explain(error)
            self._report("fetch", reason)
            return FetchAnswer(0, reason, detail, quiet=reason == "refused")
        reason = _reason(answer.outcome)
        complete = answer.chunks == asked
        if (
            answer.chunks > asked
            or reason == "unspecified"
            or complete != (reason == "complete")
            or (reason == "round_full" and answer.chunks == 0)
        ):
            self._report("fetch", "invalid_answer")
            detail = f"{answer.chunks} chunks with outcome '{reason}' where {asked} were asked for"
            return FetchAnswer(0, "invalid_answer", detail, quiet=False)
        # A deadline with some chunks is a slow fetch, not a peer at fault.
        self._report("fetch", "complete" if reason == "deadline" and answer.chunks else reason)
        return FetchAnswer(answer.chunks, reason, answer.detail, True, answer.fetched_bytes, answer.delivered_bytes)

    def store(
        self, job_id: str, destination_id: int, offset: int, keys: Sequence[bytes], timeout: float
    ) -> StoreAnswer:
        """Store chunks that lie in the region one after the other; blocks until the outcome."""
        if not self.breakers["store"].allow():
            return StoreAnswer(0, "breaker_open", "", quiet=True)
        request = pb.StoreRequest(
            job_id=job_id,
            destination_id=destination_id,
            offset=offset,
            keys=keys,
            timeout_ms=_milliseconds(timeout),
        )
        try:
            answer = self._stub.Store(request, timeout=timeout + _GRACE)
        except (grpc.RpcError, ValueError) as error:
            reason, detail = _explain(error)
            self._report("store", reason)
            return StoreAnswer(0, reason, detail, quiet=reason == "refused")
        reason = _reason(answer.outcome)
        if (
            answer.chunks > len(keys)
            or reason == "unspecified"
            or (answer.chunks == len(keys)) != (reason == "complete")
        ):
            self._report("store", "invalid_answer")
            detail = f"{answer.chunks} chunks with outcome '{reason}' where {len(keys)} were offered"
            return StoreAnswer(0, "invalid_answer", detail, quiet=False)
        self._report("store", reason)
        return StoreAnswer(answer.chunks, reason, answer.detail, True, answer.raw_bytes, answer.stored_bytes)

    def cancel(self, job_id: str) -> None:
        """Ask the data plane to end a job early, without waiting for the answer; the job's own outcome tells."""
        try:
            call = self._stub.Cancel.future(pb.CancelRequest(job_id=job_id), timeout=self._connect_timeout)
        except ValueError:  # the channel is closed, and with it the job's call
            return
        self._let_go(call)

    def statistics(self) -> pb.StatisticsResponse:
        """Return the data plane's statistics.

        Raises:
            DataPlaneError: no answer.
        """
        try:
            answer: pb.StatisticsResponse = self._stub.Statistics(pb.StatisticsRequest(), timeout=self._connect_timeout)
        except grpc.RpcError as error:
            reason, detail = _explain(error)
            raise DataPlaneError(f"statistics of the data plane at {self.address}: {detail}", reason) from error
        return answer

    def _let_go(self, call: Any) -> None:
        # gRPC ends a call that nobody holds.
        self._let_go_calls.add(call)
        call.add_done_callback(self._let_go_calls.discard)

    def _allow(self, operation: _OPERATION) -> None:
        if not self.breakers[operation].allow():
            raise DataPlaneError(
                f"{operation} at the data plane {self.address} is paused after repeated failures", "breaker_open"
            )

    def _report(self, operation: _OPERATION, reason: str) -> None:
        self.breakers[operation].report(reason not in _AT_FAULT)

    def _fail(self, operation: _OPERATION, reason: str, detail: str) -> DataPlaneError:
        self._report(operation, reason)
        return DataPlaneError(
            f"{operation} at the data plane {self.address} failed ({reason}): {detail or 'no detail'}; "
            "is `shadowserve dpu` running there, and can it reach the storage server?",
            reason,
        )


def _milliseconds(seconds: float) -> int:
    return max(1, min(int(seconds * 1000), 2**32 - 1))


def _reason(outcome: int) -> str:
    try:
        return pb.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()
    except ValueError:  # of a newer daemon
        return "unspecified"


def _explain(error: BaseException) -> tuple[str, str]:
    """Return reason and detail of a call that ended without an answer."""
    if not isinstance(error, grpc.Call):
        return "unreachable", str(error) or type(error).__name__
    code, detail = error.code(), str(error.details())[:200]
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "deadline", "the data plane did not answer in time"
    if code in _REFUSALS:
        return "refused", f"{code.name}: {detail}"
    return "unreachable", f"{code.name}: {detail}"

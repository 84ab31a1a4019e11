"""The data plane's client: deadlines on every call, a breaker for each kind of call, and a reason for every failure.

A Fetch or Store that ends without a valid answer (the connection broke, the deadline passed) is not *quiet*: the data
plane may still move bytes in the region, so the caller must not use that memory again. A call of a host that the data
plane does not know (any more) is repeated after another Hello, or ends as ``unknown_memory``.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import grpc
import numpy as np

from host_control.answers import (
    Chain,
    FetchAnswer,
    FetchCall,
    FetchPart,
    LayerStream,
    StoreAnswer,
    chains_of,
    delivered_of,
    reason_of,
)
from host_control.connection import Connection, Peer, explain
from host_control.fetch_policy import Decided
from host_control.transfer import Reason
from shadowserve import spans
from shadowserve.calibration import PlacedSteps
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import DataPlaneError
from shadowserve.pieces import Flags, unpack
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_message, steps_message
from shadowserve.tls import Credentials

__all__ = ["Breaker", "DataPlaneClient", "FetchAnswer", "FetchCall", "FetchPart", "MemoryMessage", "StoreAnswer"]

_GRACE: Final = 0.25
"""Seconds that a call may outlast the deadline in its request, so that the data plane's answer still counts."""

_PIN_KEYS_MAX: Final = 8192
"""Keys in one message about pins, as in a lookup."""

MemoryMessage = pb.SharedMemory | pb.ExportedMemory | pb.CudaIpcMemory
_MEMORY_FIELDS: Final[dict[type[Any], str]] = {
    pb.SharedMemory: "shared_memory",
    pb.ExportedMemory: "exported_memory",
    pb.CudaIpcMemory: "cuda_ipc",
}
_OPERATION = Literal["lookup", "fetch", "store", "register"]
_ADVICE: Final[dict[str, str]] = {
    Reason.UNREACHABLE: "; is `shadowserve dpu` running there?",
    Reason.DEADLINE: "; is `shadowserve dpu` running there, and can it reach the storage server?",
    Reason.STORAGE_UNAVAILABLE: "; can the data plane reach the storage server?",
}
"""Advice for failures that the data plane does not explain."""
_AT_FAULT: Final = {
    Reason.UNREACHABLE,
    Reason.DEADLINE,
    Reason.REFUSED,
    Reason.INVALID_ANSWER,
    Reason.STORAGE_UNAVAILABLE,
    Reason.STORAGE_REFUSED,
    Reason.INTERNAL,
    Reason.DEVICE,
}
_NO_ANSWER: Final = (grpc.RpcError, grpc.FutureCancelledError)


class Breaker:
    """Pauses calls to a peer after repeated failures, and always tries again.

    Closed until ``failures`` calls in a row have failed; then open for ``backoff`` seconds, doubled with each further
    failure up to ``backoff_max_s``. When the time is over one call is let through as a probe: its success closes the
    breaker, its failure opens it again. A probe that never reports counts as lost after ``backoff_max_s`` more seconds.
    """

    def __init__(
        self, failures: int, backoff: float, backoff_max_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._failures_max = failures
        self._backoff = backoff
        self._backoff_max = backoff_max_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._closed_until_probe = 0.0

    def allow(self) -> bool:
        """Tell if a call may go out now. While open, True makes this call the probe."""
        with self._lock:
            if self._failures < self._failures_max:
                return True
            now = self._clock()
            if now < self._closed_until_probe:
                return False
            self._closed_until_probe = now + self._backoff_max
            return True

    def report(self, success: bool) -> None:
        """Count the outcome of a call that :meth:`allow` let through."""
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
        """Calls are turned away."""
        with self._lock:
            return self._failures >= self._failures_max


class DataPlaneClient:
    """Calls to one data plane. Thread-safe. Time limits are in seconds.

    Args:
        address: ``host:port`` or ``unix:/path``.
        credentials: Credentials for TLS; None: no TLS.
        engine: The engine whose KV moves, which the data plane compares with others; None where no KV moves.
        connect_timeout_s: Time limit of calls that move no KV.
        failures, backoff, backoff_max_s: See :class:`Breaker`.

    Raises:
        ConfigurationError: A certificate or key cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials | None = None,
        engine: pb.Engine | None = None,
        connect_timeout_s: float = 2.0,
        failures: int = 3,
        backoff: float = 0.25,
        backoff_max_s: float = 5.0,
    ) -> None:
        self.address = address
        self._connection = Connection(address, credentials, engine)
        self._connect_timeout = connect_timeout_s
        self._kept_calls: set[Any] = set()
        self.breakers = {
            operation: Breaker(failures, backoff, backoff_max_s)
            for operation in ("lookup", "fetch", "store", "register")
        }

    def close(self) -> None:
        """End all calls."""
        self._connection.close()

    @property
    def peer(self) -> Peer | None:
        """Description of the data plane, None while not connected."""
        return self._connection.peer

    def connect(self, timeout: float, shape: ChunkLayout | None = None, *, wait: bool = True) -> Peer:
        """See :meth:`host_control.connection.Connection.connect`."""
        return self._connection.connect(timeout, shape, wait=wait)

    def wait_ready(self, timeout: float) -> bool:
        """Connect if necessary; return True if the data plane accepts this host within ``timeout`` seconds."""
        try:
            self.connect(timeout)
        except DataPlaneError:
            return False
        return True

    # ------------------------------------------------------------------ lookups and hints

    def find(
        self,
        chains: Sequence[tuple[bytes, Sequence[bytes]]],
        timeout: float,
        *,
        published: bool = True,
        prefetch: bool = False,
    ) -> Callable[[], list[Chain]]:
        """Ask which keys of each chain are stored and which are pending; connect first if necessary.

        Args:
            chains: Namespaces, and keys of their records.
            published: Ask for pending keys.
            prefetch: Let storage bring cold records nearer.

        Returns:
            A function that waits for the answer, until the deadline at most. It raises DataPlaneError where there is no
            answer, or an invalid one; its ``outcome`` is the reason.

        Raises:
            DataPlaneError: The breaker is open, or there is no connection.
        """
        self._allow("lookup")
        ends = time.monotonic() + timeout

        def start() -> Any:
            left = max(ends - time.monotonic(), 0.001)
            if self.peer is None:
                try:
                    self.connect(left, wait=False)
                except DataPlaneError as error:
                    self._report("lookup", error.outcome)
                    raise
                left = max(ends - time.monotonic(), 0.001)
            request = pb.LookupRequest(
                chains=[pb.KeyChain(keys=keys, namespace=namespace) for namespace, keys in chains],
                timeout_ms=_milliseconds(left),
                published=published,
                prefetch=prefetch,
            )
            return self._connection.stub.Lookup.future(request, **self._within(left + _GRACE / 5))

        def finish() -> list[Chain]:
            try:
                answer = call.result()
            except _NO_ANSWER as error:
                if not self._connection.lost(error):
                    raise self._fail("lookup", *explain(error)) from error
                try:
                    answer = start().result()
                except _NO_ANSWER as again:
                    raise self._fail("lookup", *explain(again)) from again
            return self._found(answer, [len(keys) for _, keys in chains])

        call = start()
        return finish

    def _found(self, answer: pb.LookupResponse, counts: Sequence[int]) -> list[Chain]:
        reason = reason_of(answer.outcome)
        if reason != Reason.COMPLETE:
            raise self._fail("lookup", reason, answer.detail)
        try:
            found = chains_of(answer, counts)
        except ValueError as error:
            raise self._fail("lookup", Reason.INVALID_ANSWER, str(error)) from error
        self._report("lookup", reason)
        return found

    def publish(
        self,
        keys: Sequence[bytes],
        seconds: float,
        *,
        plain: bool = False,
        reached: Callable[[int], None] | None = None,
    ) -> None:
        """Publish records that will be stored within some seconds; 0 seconds: withdraw them.

        A hint, which is not waited for, and not sent to a data plane that is not connected, or that fails lookups.

        Args:
            plain: They will be stored uncompressed.
            reached: Called, in any thread, with the engines that learn of it, a ``Reach`` of the wire.
        """
        if not keys:
            return
        request = pb.PublishRequest(
            keys=keys, lasts_ms=int(seconds * 1000), timeout_ms=_milliseconds(self._connect_timeout), plain=plain
        )

        def ended(call: Any) -> None:
            with contextlib.suppress(*_NO_ANSWER):
                if reached is not None and call.result().outcome == pb.OUTCOME_COMPLETE:
                    reached(call.result().reach)

        self._send_hint(self._connection.stub.Publish, request, ended)

    def pin(self, keys: Sequence[bytes], seconds: float, session: bytes, ignored: Callable[[str, str], None]) -> None:
        """Pin records for a session, also those that are stored later; 0 seconds: end the session's pins.

        A hint, which is not waited for.

        Args:
            ignored: Called, in any thread, with a reason and a detail where the pins are not set.
        """

        def ended(call: Any) -> None:
            try:
                answer: pb.PinResponse = call.result()
            except _NO_ANSWER as error:
                ignored("pin_unanswered", explain(error)[1])
                return
            if answer.outcome != pb.OUTCOME_COMPLETE:
                refused = answer.outcome == pb.OUTCOME_STORAGE_REFUSED
                ignored("pin_refused" if refused else "pin_unanswered", answer.detail)
            elif not answer.supported:
                ignored("pin_unsupported", "storage is no storage node of ShadowServe")

        for first in range(0, len(keys), _PIN_KEYS_MAX):
            request = pb.PinRequest(
                keys=keys[first : first + _PIN_KEYS_MAX],
                lasts_ms=min(math.ceil(seconds * 1000), 2**32 - 1),
                session=session,
                timeout_ms=_milliseconds(self._connect_timeout),
            )
            if not self._send_hint(self._connection.stub.Pin, request, ended):
                ignored("pin_unanswered", "there is no connection to the data plane")

    def expect(self, message: pb.ExpectRequest) -> Any:
        """Send an engine's queue; return the call.

        None: nothing is sent to a data plane that is not connected, or that fails lookups.
        """
        return self._send(self._connection.stub.Expect, message)

    def report_steps(self, message: pb.StepReport) -> Any:
        """Report an engine's steps; return the call, or None, as :meth:`expect` does."""
        return self._send(self._connection.stub.ReportSteps, message)

    def lost(self, error: BaseException) -> None:
        """Handle a failed call of :meth:`expect` or :meth:`report_steps`: Hello may be due."""
        self._connection.lost(error)

    def decided(self, result: Decided) -> None:
        """Report the decision for a prompt and its result, for recordings. A hint, which is not waited for."""
        decision = result.decision
        loaded = decision.end_tokens if decision.way != "compute" else 0
        message = pb.Decision(
            kind=decision.kind, tokens=result.tokens, loaded_tokens=loaded, predicted=dict(decision.predicted),
            predicted_seconds=decision.seconds, seconds=result.seconds, stored_bytes=int(decision.stored_bytes),
            cold_seconds=decision.cold_seconds, queued_seconds=decision.queued_seconds,
            tier_bytes={tier.label: int(size) for tier, size in decision.tier_bytes.items()},
            layer_waits=[
                pb.LayerWait(
                    begin_s=min(max(wait.begin_s - result.since, 0.0), result.seconds),  # clocks of two machines
                    seconds=wait.seconds,
                    ahead=wait.ahead,
                )
                for wait in result.layer_waits
            ],
            not_layerwise=result.not_layerwise,
        )  # fmt: skip
        self._send_hint(self._connection.stub.Decided, message)

    def _send(self, method: Any, message: Any) -> Any:
        if self.peer is None or self.breakers["lookup"].open:
            return None
        try:
            return method.future(message, **self._within(self._connect_timeout))
        except ValueError:  # the channel is closed
            return None

    def _send_hint(self, method: Any, request: Any, ended: Callable[[Any], None] | None = None) -> bool:
        if (call := self._send(method, request)) is None:
            return False
        self._keep_alive(call)
        if ended is not None:
            call.add_done_callback(ended)
        return True

    # ------------------------------------------------------------------ memory

    def register(
        self,
        shapes: Sequence[ChunkLayout],
        memory: MemoryMessage,
        pages: pb.PagedMemory | None = None,
        steps: PlacedSteps | None = None,
    ) -> int:
        """Register memory for chunks of some layouts; return its ID. The caller has asked the breaker.

        ``pages``: positions of an engine's pages in the memory. ``steps``: steps for layouts of ``weighted``.

        Raises:
            DataPlaneError: Refused, unreachable, or the data plane computes another chunk size than this host.
        """
        request = pb.RegisterMemoryRequest(
            layouts=map(layout_message, shapes),
            pages=pages,
            steps=None if steps is None else steps_message(steps.steps),
            shards=[pb.Shard(first_layer=layer, first_head=head) for layer, head in (steps.starts if steps else ())],
            **{_MEMORY_FIELDS[type(memory)]: memory},  # type: ignore[arg-type]
        )
        try:
            answer = self._connection.stub.RegisterMemory(request, **self._within(self._connect_timeout))
        except grpc.RpcError as error:
            self._connection.lost(error)
            raise self._fail("register", *explain(error)) from error
        if list(answer.chunk_bytes) != (ours := [shape.raw_bytes for shape in shapes]):
            detail = f"the data plane counts {list(answer.chunk_bytes)[:16]} bytes in a chunk, this host {ours[:16]}"
            raise self._fail("register", Reason.INVALID_ANSWER, detail)
        self._report("register", Reason.COMPLETE)
        return int(answer.memory_id)

    def release(self, memory_id: int, *, wait: bool) -> bool:
        """Release registered memory; a data plane that does not answer releases it after some time.

        ``wait``: wait for the answer, at most ``connect_timeout_s`` seconds. Return True if it came, so that the data
        plane will not use the memory any more.
        """
        request = pb.ReleaseMemoryRequest(memory_id=memory_id)
        with contextlib.suppress(*_NO_ANSWER, ValueError):  # ValueError: the channel is closed
            call = self._connection.stub.ReleaseMemory.future(request, **self._within(self._connect_timeout))
            if wait:
                call.result()
                return True
            self._keep_alive(call)
        return False

    # ------------------------------------------------------------------ fetches

    def start_fetch(
        self,
        job_id: str,
        parts: Sequence[FetchPart],
        timeout: float,
        *,
        layerwise: bool = False,
        progress: int | None = None,
        streamed: bool = False,
        window_s: float = 0.0,
        purpose: Any = pb.PURPOSE_REQUEST,
    ) -> FetchCall:
        """Start one batch.

        Args:
            job_id: Unique among calls in flight.
            parts: Wanted pieces of each shard; the regions do not overlap.
            layerwise: Fetch layer by layer, not chunk by chunk.
            progress: Offset, in the memory of the first part, of the word where the data plane counts the leading
                chunks of every part that are in place; layer by layer, the leading layers of parts of one window.
            streamed: :meth:`FetchCall.wait` tells the leading layers, for memory that the data plane does not share.
            window_s: Seconds that the engine will compute with each layer; 0 if unknown.

        Raises:
            DataPlaneError: The breaker is open.
        """
        request = pb.FetchRequest(
            job_id=job_id,
            parts=[part.message for part in parts],
            order=pb.ORDER_LAYERS if layerwise else pb.ORDER_CHUNKS,
            timeout_ms=_milliseconds(timeout),
            progress=progress,
            window_us=_microseconds(window_s),
            purpose=purpose,
        )
        start = self._stream if streamed else self._connection.stub.Fetch.future
        return self._start(start, request, timeout, [part.wanted for part in parts])

    def _stream(self, request: pb.FetchRequest, **how: Any) -> LayerStream:
        return LayerStream(self._connection.stub.FetchLayers(request, **how))

    def start_fetch_pages(
        self,
        job_id: str,
        memory_id: int,
        shape: ChunkLayout,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        timeout: float,
        progress: int,
    ) -> FetchCall:
        """Start to bring chunks from devices of the data plane into blocks of paged memory, chunk after chunk.

        ``progress``: offset of the word in that memory where the data plane counts the leading layers in place.

        Raises:
            DataPlaneError: The breaker is open.
        """
        request = pb.FetchPagesRequest(
            job_id=job_id,
            memory_id=memory_id,
            keys=keys,
            blocks=blocks,
            timeout_ms=_milliseconds(timeout),
            progress=progress,
        )
        wanted = np.ones((shape.layers, len(keys)), np.bool_)
        return self._start(self._connection.stub.FetchPages.future, request, timeout, [wanted])

    def _start(self, method: Callable[..., Any], request: Any, timeout: float, wanted: Sequence[Flags]) -> FetchCall:
        self._allow("fetch")
        call = method(request, **self._within(timeout + _GRACE))
        return FetchCall(call, lambda ended: self._fetch_answer(ended, wanted))

    def _fetch_answer(self, call: Any, wanted: Sequence[Flags]) -> FetchAnswer:
        nothing = [np.zeros_like(each) for each in wanted]
        try:
            answer = call.result()
        except _NO_ANSWER as error:
            return FetchAnswer(nothing, wanted, *self._unanswered("fetch", error))
        reason = reason_of(answer.outcome)
        try:
            delivered = delivered_of(answer, wanted)
        except ValueError as error:
            self._report("fetch", Reason.INVALID_ANSWER)
            return FetchAnswer(nothing, wanted, Reason.INVALID_ANSWER, str(error), quiet=False)
        # After a deadline with some pieces the fetch is slow, and the peer not at fault.
        slow = reason == Reason.DEADLINE and any(each.any() for each in delivered)
        self._report("fetch", Reason.COMPLETE if slow else reason)
        moved = (answer.fetched_bytes, answer.delivered_bytes)
        return FetchAnswer(delivered, wanted, reason, answer.detail, True, *moved)

    def cancel(self, job_id: str) -> None:
        """Ask the data plane to end a job early. The answer is not waited for: the job's own outcome tells."""
        request = pb.CancelRequest(job_id=job_id)
        with contextlib.suppress(ValueError):  # the channel is closed, and with it the job's call
            self._keep_alive(self._connection.stub.Cancel.future(request, **self._within(self._connect_timeout)))

    # ------------------------------------------------------------------ stores, statistics

    def store(
        self,
        job_id: str,
        memory_id: int,
        offset: int,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        timeout: float,
        *,
        positions: Sequence[int] = (),
        layout: int = 0,
        lasts_s: float = 0.0,
        plain: bool = False,
        purpose: Any = pb.PURPOSE_REQUEST,
        keep: Any = pb.KEEP_ALL,
    ) -> StoreAnswer:
        """Store chunks that are in registered memory one after the other; block until the outcome.

        Args:
            job_id: Unique among calls in flight.
            memory_id, offset: Memory and offset of the first chunk.
            parents: Key of the chunk before each of them in its prompt; empty for a prompt's first.
            positions: Position of each chunk's first token in its prompt, in a layout of ``weighted``.
            layout: Index of the chunk layout among those that the memory was registered with.
            lasts_s: Seconds after which the chunks are of no use; 0: for good.
            plain: Store uncompressed, so that devices can bring the chunks into pages.
            keep: Tiers that keep the records.
        """
        nothing = unpack(b"", len(keys))
        if not self.breakers["store"].allow():
            return StoreAnswer(nothing, Reason.BREAKER_OPEN, "", quiet=True)
        request = pb.StoreRequest(
            job_id=job_id,
            memory_id=memory_id,
            offset=offset,
            keys=keys,
            parents=parents,
            positions=positions,
            timeout_ms=_milliseconds(timeout),
            lasts_ms=math.ceil(lasts_s * 1000),
            plain=plain,
            layout=layout,
            purpose=purpose,
            keep=keep,
        )
        try:
            answer = self._connection.stub.Store(request, **self._within(timeout + _GRACE))
        except (grpc.RpcError, ValueError) as error:
            return StoreAnswer(nothing, *self._unanswered("store", error))
        reason = reason_of(answer.outcome)
        try:
            stored = unpack(answer.stored, len(keys))
            if reason == Reason.UNSPECIFIED or bool(stored.all()) != (reason == Reason.COMPLETE):
                raise ValueError(f"{stored.sum()} chunks with outcome '{reason}' where {len(keys)} were offered")
        except ValueError as error:
            self._report("store", Reason.INVALID_ANSWER)
            return StoreAnswer(nothing, Reason.INVALID_ANSWER, str(error), quiet=False)
        self._report("store", reason)
        return StoreAnswer(stored, reason, answer.detail, True, answer.raw_bytes, answer.stored_bytes)

    def statistics(self) -> pb.StatisticsResponse:
        """Return the data plane's statistics; raise DataPlaneError if there is no answer."""
        try:
            request = pb.StatisticsRequest()
            answer: pb.StatisticsResponse = self._connection.stub.Statistics(request, timeout=self._connect_timeout)
        except grpc.RpcError as error:
            reason, detail = explain(error)
            raise DataPlaneError(f"statistics of the data plane at {self.address}: {detail}", reason) from error
        return answer

    def trace(self, seconds: float, fetches: int) -> Iterator[pb.TraceResponse]:
        """Record this host's next fetches; yield an empty answer once the recording runs, then its parts.

        It ends after some seconds, or earlier after a number of calls.

        Raises:
            DataPlaneError: The data plane is not reachable, or does not record.
        """
        self.connect(self._connect_timeout, wait=False)
        request = pb.TraceRequest(timeout_ms=_milliseconds(seconds), fetches=fetches)
        try:
            yield from self._connection.stub.Trace(request, **self._within(seconds + self._connect_timeout))
        except grpc.RpcError as error:
            reason, detail = explain(error)
            raise DataPlaneError(f"the data plane at {self.address} does not record: {detail}", reason) from error

    # ------------------------------------------------------------------ for all calls

    def _within(self, timeout: float) -> dict[str, Any]:
        """Return gRPC's arguments of a call of this session."""
        context = spans.current()
        traced = ((spans.HEADER, context),) if context else ()
        return {"timeout": timeout, "metadata": self._connection.metadata() + traced}

    def _keep_alive(self, call: Any) -> None:
        # gRPC ends a call without references.
        self._kept_calls.add(call)
        call.add_done_callback(self._kept_calls.discard)

    def _allow(self, operation: _OPERATION) -> None:
        if not self.breakers[operation].allow():
            raise DataPlaneError(
                f"{operation} at the data plane {self.address} is paused after repeated failures", Reason.BREAKER_OPEN
            )

    def _report(self, operation: _OPERATION, reason: str) -> None:
        self.breakers[operation].report(reason not in _AT_FAULT)

    def _unanswered(self, operation: _OPERATION, error: BaseException) -> tuple[str, str, bool]:
        """Return reason and detail of a call that ended without an answer, and True if it is quiet nevertheless."""
        if self._connection.lost(error):
            return Reason.UNKNOWN_MEMORY, "the data plane does not know this host", True
        reason, detail = explain(error)
        self._report(operation, reason)
        return reason, detail, reason == Reason.REFUSED

    def _fail(self, operation: _OPERATION, reason: str, detail: str) -> DataPlaneError:
        self._report(operation, reason)
        advice = _ADVICE.get(reason, "")
        return DataPlaneError(
            f"{operation} at the data plane {self.address} failed ({reason}): {detail or 'no detail'}{advice}", reason
        )


def _milliseconds(seconds: float) -> int:
    return max(1, min(int(seconds * 1000), 2**32 - 1))


def _microseconds(seconds: float) -> int:
    return min(int(seconds * 1e6), 2**32 - 1)

"""The data plane's client: deadlines on every call, a breaker for each kind of call, and a reason for every failure.

Connecting (:mod:`host_control.connection`) is saying Hello. A call that finds that the daemon does not know this host
(any more) is repeated after another Hello, or ends as ``unknown_memory``: a daemon that does not know the host
does not know its memory either.

What the daemon answers is checked before it is believed. A Fetch or Store that ends without an answer (the connection
broke, the deadline passed, the answer makes no sense) is not *quiet*: the daemon may still move bytes in the region, so
the caller must not use that memory again (:mod:`host_control.registered_memory` retires it).
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal

import grpc
import numpy as np

from host_control.answers import (
    FetchAnswer,
    FetchCall,
    FetchPart,
    Found,
    Registration,
    StoreAnswer,
    delivered_of,
    found_of,
    reason_of,
)
from host_control.breaker import Breaker
from host_control.connection import Connection, Peer, explain
from host_control.fetch_policy import Decision
from host_control.layer_stream import LayerStream
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import DataPlaneError
from shadowserve.pieces import Flags, unpack
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto.convert import layout_message
from shadowserve.tls import Credentials

__all__ = [
    "DataPlaneClient",
    "FetchAnswer",
    "FetchCall",
    "FetchPart",
    "MemoryMessage",
    "Registration",
    "StoreAnswer",
]

_GRACE: Final = 0.25
"""Seconds that a call may outlast the deadline that the daemon was given: its answer is worth more than the time."""

MemoryMessage = pb.SharedMemory | pb.ExportedMemory | pb.CudaIpcMemory
_MEMORY_FIELDS: Final[dict[type[Any], str]] = {
    pb.SharedMemory: "shared_memory",
    pb.ExportedMemory: "exported_memory",
    pb.CudaIpcMemory: "cuda_ipc",
}
_OPERATION = Literal["lookup", "fetch", "store", "register"]
_ADVICE: Final = {
    "unreachable": "; is `shadowserve dpu` running there?",
    "deadline": "; is `shadowserve dpu` running there, and can it reach the storage server?",
    "storage_unavailable": "; can the data plane reach the storage server?",
}
"""What to do about failures of which the data plane itself says nothing, or too little."""
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


class DataPlaneClient:
    """Calls to one data plane. Thread-safe.

    Args:
        address: ``host:port`` or ``unix:/path``.
        credentials: for TLS; ``None`` for none.
        engine: whose KV moves, for the data plane to compare with others; ``None`` where none does.
        connect_timeout_s: seconds for calls that move no KV.
        failures, backoff, backoff_max_s: see :class:`Breaker`.

    Raises:
        ConfigurationError: a certificate or key cannot be used.
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
        self._let_go_calls: set[Any] = set()
        self.breakers = {
            operation: Breaker(failures, backoff, backoff_max_s)
            for operation in ("lookup", "fetch", "store", "register")
        }

    def close(self) -> None:
        """End all calls."""
        self._connection.close()

    @property
    def peer(self) -> Peer | None:
        """What the data plane said of itself, ``None`` while not connected."""
        return self._connection.peer

    def connect(self, timeout: float, shape: ChunkLayout | None = None, *, wait: bool = True) -> Peer:
        """Say Hello; see :meth:`host_control.connection.Connection.connect`. ``shape`` is of chunks that will move.

        Raises:
            DataPlaneError: there is no connection; the message says why and what to do.
        """
        if shape is None:
            return self._connection.connect(timeout, None, 0, wait=wait)
        return self._connection.connect(timeout, layout_message(shape), shape.raw_bytes, wait=wait)

    def wait_ready(self, timeout: float) -> bool:
        """Return whether the data plane has taken this host within ``timeout`` seconds; connects, where need be."""
        try:
            self.connect(timeout)
        except DataPlaneError:
            return False
        return True

    def lookup(self, chains: Sequence[tuple[bytes, Sequence[bytes]]], timeout: float) -> Callable[[], list[Flags]]:
        """Ask which keys of each chain are stored; connects first, where need be.

        Args:
            chains: namespaces, and keys of their records.
            timeout: seconds.

        Returns:
            What waits for the answer, at most until the deadline, and returns it; it raises DataPlaneError where there
            is none, or one that cannot be, whose ``outcome`` says which.

        Raises:
            DataPlaneError: the breaker is open, or there is no connection.
        """
        finish = self.find(chains, timeout, published=False)
        return lambda: finish().present

    def find(
        self,
        chains: Sequence[tuple[bytes, Sequence[bytes]]],
        timeout: float,
        *,
        published: bool = True,
        prefetch: bool = False,
    ) -> Callable[[], Found]:
        """Ask, as :meth:`lookup` does, which keys of each chain are stored, and which ``published``.

        Args:
            chains, timeout: as there.
            published: whether to ask for that, too.
            prefetch: have storage begin to bring what is cold.
        """
        self._allow("lookup")
        ends = time.monotonic() + timeout

        def start() -> Any:
            left = max(ends - time.monotonic(), 0.001)
            if self.peer is None:
                self._connect_for("lookup", left)
                left = max(ends - time.monotonic(), 0.001)
            request = pb.LookupRequest(
                chains=[pb.KeyChain(keys=keys, namespace=namespace) for namespace, keys in chains],
                timeout_ms=_milliseconds(left),
                published=published,
                prefetch=prefetch,
            )
            return self._connection.stub.Lookup.future(
                request, timeout=left + _GRACE / 5, metadata=self._connection.metadata()
            )

        def finish() -> Found:
            try:
                answer = call.result()
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                if not self._connection.lost(error):
                    raise self._fail("lookup", *explain(error)) from error
                try:
                    answer = start().result()
                except (grpc.RpcError, grpc.FutureCancelledError) as again:
                    raise self._fail("lookup", *explain(again)) from again
            return self._found(answer, [len(keys) for _, keys in chains])

        call = start()
        return finish

    def _connect_for(self, operation: _OPERATION, timeout: float) -> None:
        try:
            self.connect(timeout, wait=False)
        except DataPlaneError as error:
            self._report(operation, error.outcome)
            raise

    def publish(
        self,
        keys: Sequence[bytes],
        seconds: float,
        *,
        plain: bool = False,
        reached: Callable[[int], None] | None = None,
    ) -> None:
        """Say that records will be stored within so long; 0: that they will not, after all. A hint: nobody waits.

        Nothing is said to a data plane that is not connected, or that fails lookups.

        Args:
            keys: of the records.
            seconds: from now on.
            plain: they will be stored as :meth:`store` has it.
            reached: takes which engines hear of it, a ``Reach`` of the wire, in any thread, if there is an answer.
        """
        if not keys:
            return
        request = pb.PublishRequest(
            keys=keys, lasts_ms=int(seconds * 1000), timeout_ms=_milliseconds(self._connect_timeout), plain=plain
        )

        def ended(call: Any) -> None:
            with contextlib.suppress(grpc.RpcError, grpc.FutureCancelledError):
                if reached is not None and call.result().outcome == pb.OUTCOME_COMPLETE:
                    reached(call.result().reach)

        self._tell(self._connection.stub.Publish, request, ended)

    def expect(self, message: pb.ExpectRequest) -> Any:
        """Say what waits in an engine's queue; return the call, which nobody has to wait for.

        None: nothing is said to a data plane that is not connected, or that fails lookups.
        """
        return self._say(self._connection.stub.Expect, message)

    def report_steps(self, message: pb.StepReport) -> Any:
        """Report an engine's steps; return the call, or None, as :meth:`expect` does."""
        return self._say(self._connection.stub.ReportSteps, message)

    def _say(self, method: Any, message: Any) -> Any:
        if self.peer is None or self.breakers["lookup"].open:
            return None
        try:
            return method.future(message, timeout=self._connect_timeout, metadata=self._connection.metadata())
        except ValueError:  # the channel is closed
            return None

    def lost(self, error: BaseException) -> None:
        """Take note of why a call of :meth:`expect` or :meth:`report_steps` has failed: Hello may be due."""
        self._connection.lost(error)

    def decided(self, decision: Decision, tokens: int, seconds: float) -> None:
        """Say what was done with a prompt of so many tokens, and what came, for recordings; a hint likewise."""
        loaded = decision.end_tokens if decision.way != "compute" else 0
        told = pb.Decision(
            kind=decision.kind, tokens=tokens, loaded_tokens=loaded, predicted=dict(decision.predicted),
            predicted_seconds=decision.seconds, seconds=seconds, stored_bytes=int(decision.stored_bytes),
            cold_seconds=decision.cold_seconds, queued_seconds=decision.queued_seconds,
            tier_bytes={tier.label: int(size) for tier, size in decision.tier_bytes.items()},
        )  # fmt: skip
        self._tell(self._connection.stub.Decided, told)

    def _tell(self, method: Any, request: Any, ended: Callable[[Any], None] | None = None) -> None:
        if (call := self._say(method, request)) is not None:
            self._let_go(call)
            if ended is not None:
                call.add_done_callback(ended)

    def _found(self, answer: pb.LookupResponse, counts: Sequence[int]) -> Found:
        reason = reason_of(answer.outcome)
        if reason != "complete":
            raise self._fail("lookup", reason, answer.detail)
        try:
            found = found_of(answer, counts)
        except ValueError as error:
            raise self._fail("lookup", "invalid_answer", str(error)) from error
        self._report("lookup", reason)
        return found

    def register(
        self, shapes: Sequence[ChunkLayout], memory: MemoryMessage, pages: pb.PagedMemory | None = None
    ) -> Registration:
        """Register memory at the data plane, for chunks of some shapes. The caller has asked the breaker.

        Args:
            shapes: of the chunks; calls name one by its index.
            memory: to be registered.
            pages: where an engine's pages are in it.

        Raises:
            DataPlaneError: refused, unreachable, or the daemon counts another chunk size than we do.
        """
        request = pb.RegisterMemoryRequest(
            layouts=map(layout_message, shapes),
            pages=pages,
            **{_MEMORY_FIELDS[type(memory)]: memory},  # type: ignore[arg-type]
        )
        try:
            answer = self._connection.stub.RegisterMemory(
                request, timeout=self._connect_timeout, metadata=self._connection.metadata()
            )
        except grpc.RpcError as error:
            self._connection.lost(error)
            raise self._fail("register", *explain(error)) from error
        if list(answer.chunk_bytes) != (ours := [shape.raw_bytes for shape in shapes]):
            detail = f"the data plane counts {list(answer.chunk_bytes)[:16]} bytes in a chunk, this host {ours[:16]}"
            raise self._fail("register", "invalid_answer", detail)
        self._report("register", "complete")
        return Registration(answer.memory_id)

    def release(self, memory_id: int, *, wait: bool) -> bool:
        """Have the data plane forget memory; one that does not answer forgets it by itself, some time.

        Args:
            memory_id: of the memory.
            wait: for the answer, at most ``connect_timeout_s`` seconds.

        Returns:
            Whether it has answered, so that it will not touch the memory any more; always false without ``wait``.
        """
        request = pb.ReleaseMemoryRequest(memory_id=memory_id)
        try:
            call = self._connection.stub.ReleaseMemory.future(
                request, timeout=self._connect_timeout, metadata=self._connection.metadata()
            )
            if wait:
                call.result()
                return True
            self._let_go(call)
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError):  # ValueError: the channel is closed
            pass
        return False

    def start_fetch(
        self,
        job_id: str,
        parts: Sequence[FetchPart],
        timeout: float,
        *,
        layerwise: bool = False,
        progress: int | None = None,
        window_s: float = 0.0,
        purpose: Any = pb.PURPOSE_REQUEST,
    ) -> FetchCall:
        """Start one batch.

        Args:
            job_id: unlike those of other calls in progress.
            parts: that are wanted; their regions do not overlap.
            timeout: seconds.
            layerwise: fetch layer by layer, not chunk by chunk.
            progress: where in the memory of the first part the data plane is to say how many leading chunks of every
                part are in place, or layer by layer, how many leading layers of the only one.
            window_s: seconds that will be computed with each layer; 0 where nobody knows.
            purpose: what for, of the wire's.

        Raises:
            DataPlaneError: the breaker is open.
        """
        order = pb.ORDER_LAYERS if layerwise else pb.ORDER_CHUNKS
        future = self._connection.stub.Fetch.future
        return self._start(future, job_id, parts, timeout, order, progress, window_s, purpose)

    def start_fetch_layers(self, job_id: str, part: FetchPart, timeout: float, window_s: float = 0.0) -> FetchCall:
        """Start one batch of a part layer by layer, of which :meth:`FetchCall.layers` tells how far it is.

        For memory that the data plane does not share; arguments and errors are those of :meth:`start_fetch`.
        """

        def stream(*arguments: Any, **named: Any) -> LayerStream:
            return LayerStream(self._connection.stub.FetchLayers(*arguments, **named))

        return self._start(stream, job_id, [part], timeout, pb.ORDER_LAYERS, None, window_s)

    def _start(
        self,
        method: Callable[..., Any],
        job_id: str,
        parts: Sequence[FetchPart],
        timeout: float,
        order: Any,
        progress: int | None,
        window_s: float,
        purpose: Any = pb.PURPOSE_REQUEST,
    ) -> FetchCall:
        self._allow("fetch")
        request = pb.FetchRequest(
            job_id=job_id,
            parts=[part.message for part in parts],
            order=order,
            timeout_ms=_milliseconds(timeout),
            progress=progress,
            window_us=min(int(1e6 * window_s), 0xFFFFFFFF),
            purpose=purpose,
        )
        call = method(request, timeout=timeout + _GRACE, metadata=self._connection.metadata())
        return FetchCall(call, lambda ended: self._fetch_answer(ended, [part.wanted for part in parts]))

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
        """Start to bring chunks from devices of the data plane into pages.

        Args:
            job_id: unlike those of other calls in progress.
            memory_id: of the paged memory.
            shape: of the chunks.
            keys: of the chunks.
            blocks: that they go to, chunk after chunk.
            timeout: seconds.
            progress: where in that memory to say how many leading layers are in place.

        Raises:
            DataPlaneError: the breaker is open.
        """
        self._allow("fetch")
        request = pb.FetchPagesRequest(
            job_id=job_id,
            memory_id=memory_id,
            keys=keys,
            blocks=blocks,
            timeout_ms=_milliseconds(timeout),
            progress=progress,
        )
        call = self._connection.stub.FetchPages.future(
            request, timeout=timeout + _GRACE, metadata=self._connection.metadata()
        )
        return FetchCall(call, lambda ended: self._fetch_answer(ended, [np.ones((shape.layers, len(keys)), np.bool_)]))

    def _fetch_answer(self, call: Any, wanted: Sequence[Flags]) -> FetchAnswer:
        nothing = [np.zeros_like(each) for each in wanted]
        try:
            answer = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            return FetchAnswer(nothing, wanted, *self._unanswered("fetch", error))
        reason = reason_of(answer.outcome)
        try:
            delivered = delivered_of(answer, wanted)
        except ValueError as error:
            self._report("fetch", "invalid_answer")
            return FetchAnswer(nothing, wanted, "invalid_answer", str(error), quiet=False)
        # A deadline with some pieces is a slow fetch, not a peer at fault.
        slow = reason == "deadline" and any(each.any() for each in delivered)
        self._report("fetch", "complete" if slow else reason)
        moved = (answer.fetched_bytes, answer.delivered_bytes)
        return FetchAnswer(delivered, wanted, reason, answer.detail, True, *moved)

    def store(
        self,
        job_id: str,
        memory_id: int,
        offset: int,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        timeout: float,
        *,
        layout: int = 0,
        lasts_s: float = 0.0,
        plain: bool = False,
        purpose: Any = pb.PURPOSE_REQUEST,
    ) -> StoreAnswer:
        """Store chunks that lie in the region one after the other; blocks until the outcome.

        ``layout`` is the index of their shape among those that the memory was registered with.

        ``parents`` are the chunks before each of them in its prompt, empty for a prompt's first. After ``lasts_s``
        seconds nobody needs them any more; 0: they are stored for good. ``plain``: not compressed, so that devices can
        bring them into pages. ``purpose``: what for, of the wire's.
        """
        nothing = unpack(b"", len(keys))
        if not self.breakers["store"].allow():
            return StoreAnswer(nothing, "breaker_open", "", quiet=True)
        request = pb.StoreRequest(
            job_id=job_id,
            memory_id=memory_id,
            offset=offset,
            keys=keys,
            parents=parents,
            timeout_ms=_milliseconds(timeout),
            lasts_ms=int(lasts_s * 1000),
            plain=plain,
            layout=layout,
            purpose=purpose,
        )
        try:
            answer = self._connection.stub.Store(
                request, timeout=timeout + _GRACE, metadata=self._connection.metadata()
            )
        except (grpc.RpcError, ValueError) as error:
            return StoreAnswer(nothing, *self._unanswered("store", error))
        reason = reason_of(answer.outcome)
        try:
            stored = unpack(answer.stored, len(keys))
            if reason == "unspecified" or bool(stored.all()) != (reason == "complete"):
                raise ValueError(f"{stored.sum()} chunks with outcome '{reason}' where {len(keys)} were offered")
        except ValueError as error:
            self._report("store", "invalid_answer")
            return StoreAnswer(nothing, "invalid_answer", str(error), quiet=False)
        self._report("store", reason)
        return StoreAnswer(stored, reason, answer.detail, True, answer.raw_bytes, answer.stored_bytes)

    def cancel(self, job_id: str) -> None:
        """Ask the data plane to end a job early, without waiting for the answer; the job's own outcome tells."""
        try:
            request = pb.CancelRequest(job_id=job_id)
            call = self._connection.stub.Cancel.future(
                request, timeout=self._connect_timeout, metadata=self._connection.metadata()
            )
        except ValueError:  # the channel is closed, and with it the job's call
            return
        self._let_go(call)

    def statistics(self) -> pb.StatisticsResponse:
        """Return the data plane's statistics.

        Raises:
            DataPlaneError: no answer.
        """
        try:
            answer: pb.StatisticsResponse = self._connection.stub.Statistics(
                pb.StatisticsRequest(), timeout=self._connect_timeout
            )
        except grpc.RpcError as error:
            reason, detail = explain(error)
            raise DataPlaneError(f"statistics of the data plane at {self.address}: {detail}", reason) from error
        return answer

    def trace(self, seconds: float, fetches: int) -> Iterator[pb.TraceResponse]:
        """Record this host's next fetches: yields an empty answer once the recording runs, then its parts.

        Args:
            seconds: to record at most.
            fetches: calls after whose end it is over sooner.

        Raises:
            DataPlaneError: the data plane is away, or does not record.
        """
        self.connect(self._connect_timeout, wait=False)
        request = pb.TraceRequest(timeout_ms=_milliseconds(seconds), fetches=fetches)
        try:
            timeout = seconds + self._connect_timeout
            yield from self._connection.stub.Trace(request, timeout=timeout, metadata=self._connection.metadata())
        except grpc.RpcError as error:
            reason, detail = explain(error)
            raise DataPlaneError(f"the data plane at {self.address} does not record: {detail}", reason) from error

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

    def _unanswered(self, operation: _OPERATION, error: BaseException) -> tuple[str, str, bool]:
        """Return reason and detail of a call that ended without an answer, and whether it is quiet all the same."""
        if self._connection.lost(error):
            return "unknown_memory", "the data plane does not know this host", True
        reason, detail = explain(error)
        self._report(operation, reason)
        return reason, detail, reason == "refused"

    def _fail(self, operation: _OPERATION, reason: str, detail: str) -> DataPlaneError:
        self._report(operation, reason)
        advice = _ADVICE.get(reason, "")
        return DataPlaneError(
            f"{operation} at the data plane {self.address} failed ({reason}): {detail or 'no detail'}{advice}", reason
        )


def _milliseconds(seconds: float) -> int:
    return max(1, min(int(seconds * 1000), 2**32 - 1))

"""A data plane over a dict with the real protocol. It follows a script: it stalls, refuses, sends wrong data, dies."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from machine import WAIT_MAX_S, free_port

from shadowserve import native
from shadowserve.chunk import DType
from shadowserve.pieces import leading, pack, unpack
from shadowserve.proto import HELLO_KEY, SESSION_KEY
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.proto import dataplane_pb2_grpc as rpc


def first(chunks: int, count: int) -> bytes:
    """Return the set of the first ``chunks`` of ``count``, also if ``chunks`` is larger than ``count``."""
    return pack(np.arange(max(chunks, count)) < chunks)


def pieces(layers: int, chunks: int, count: int) -> bytes:
    """Return all layers of the first ``chunks`` of ``count``, also if ``chunks`` is larger than ``count``."""
    return pack(np.tile(np.arange(max(chunks, count)) < chunks, (layers, 1)))


def stored(client: Any, chains: list[tuple[bytes, list[bytes]]], timeout: float = WAIT_MAX_S) -> list[Any]:
    """Return flags of the stored records of each chain, as the data plane of a client says."""
    return [chain.stored for chain in client.find(chains, timeout)()]


@dataclass
class Clock:
    """The machine's clock, until a test sets the time; after that it stands still."""

    now: float | None = None

    def __call__(self) -> float:
        return time.monotonic() if self.now is None else self.now


class _Mapping(mmap.mmap):
    """A mapping of a file that a test may shorten during a write. As in the real data plane, the process continues."""

    guard: native.Guard

    def __del__(self) -> None:
        self.guard.close()


@dataclass
class _Memory:
    """A region of registered memory, as one of its layouts describes it."""

    mapping: mmap.mmap
    layout: pb.ChunkLayout

    @property
    def layers(self) -> int:
        return self.layout.layers

    @property
    def chunk_bytes(self) -> int:
        each = self.layout
        return each.layers * each.kinds * each.vector_length * each.tokens * DType.from_label(each.dtype).itemsize


@dataclass
class Script:
    """The faults. Tests change them while the server runs."""

    fetch_delay: float = 0.0
    batch_chunks: int = 1 << 30
    """Number of chunks in the buffers."""
    batch_layers: int = 1 << 30
    """Number of layers in the buffers, in layer order."""
    lookup_hits: Callable[[list[int]], list[int]] | None = None
    """Changes the hits of a lookup."""
    lookup_answer: Callable[[pb.LookupResponse], Any] | None = None
    """Changes the answer to a lookup."""
    record_bytes: int = 0
    """Bytes of each record in answers to lookups; 0: answers do not contain them."""
    cold_ms: int = 0
    """Time after which storage has loaded the cold records of each chain, in lookup answers."""
    cold: set[bytes] = field(default_factory=set)
    """Keys of cold records, until a lookup loads them."""
    brings: int = 1 << 30
    """Largest number of cold records that a lookup loads."""
    tiers: dict[bytes, int] = field(default_factory=dict)
    """Tiers of records, by key; all other records are in storage."""
    fetch_answer: Callable[[pb.FetchResponse, pb.FetchRequest], pb.FetchResponse] | None = None
    """Changes the answer to a fetch, after delivering."""
    fail_fetch_at: int | None = None
    """Number of chunks of a request to deliver; the next chunk gets garbage, and the answer is ``fail_outcome``."""
    fail_outcome: int = pb.OUTCOME_CORRUPT
    fail_layer: int | None = None
    """In layer order: layer of the chunk ``fail_fetch_at`` of the last part that gets garbage; the fetch ends there."""
    before_layer: Callable[[int], Any] | None = None
    """In layer order: function that runs before each layer."""
    answers_streams: bool = True
    """True if a stream of layers ends with an answer."""
    after_chunk: Callable[[int], Any] | None = None
    """With progress in chunk order: function that runs with the number of delivered chunks."""
    layer_delay: float = 0.0
    """Seconds before each layer, in layer order."""
    expect_answer: Callable[[pb.ExpectRequest], pb.ExpectResponse] = lambda request: pb.ExpectResponse()
    """Answer about the waiting requests of an engine's queue."""
    pin_answer: pb.PinResponse = field(
        default_factory=lambda: pb.PinResponse(outcome=pb.OUTCOME_COMPLETE, supported=True)
    )
    store_outcome: int | None = None
    not_storable: set[bytes] = field(default_factory=set)
    """Keys of records that cannot be stored."""
    abort: dict[str, grpc.StatusCode] = field(default_factory=dict)
    """Method name -> status code."""
    stall: set[str] = field(default_factory=set)
    """Methods that accept a call and do not answer until the client has disconnected or :attr:`unstall` is set."""
    unstall: threading.Event = field(default_factory=threading.Event)
    write_after_stall: bool = False
    """A stalled fetch fills its region with 0xEE after the client has abandoned it."""


class Spoilt(dict[bytes, bytes]):
    """Records; those with a limited lifetime are stored with other bytes."""

    def __init__(self, plane: Any) -> None:
        super().__init__()
        self._plane = plane

    def setdefault(self, key: bytes, value: bytes) -> bytes:
        return super().setdefault(key, value if not self._plane.stores[-1].lasts_ms else value[::-1])


class ScriptedDataPlane(rpc.DataPlaneServicer):
    def __init__(
        self,
        address: str = "",
        records: dict[bytes, bytes] | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.records: dict[bytes, bytes] = {} if records is None else records
        self.script = Script()
        self.calls: list[str] = []
        self.asked_keys: list[list[bytes]] = []  # of each chain, by the last Lookup
        self.prefetches = 0  # lookups that load cold records
        self.hellos: list[pb.HelloRequest] = []
        self.differences: list[str] = []  # in the answer to Hello
        self.fetches: list[pb.FetchPart] = []
        self.reports: list[pb.StepReport] = []
        self.moved_bytes = 0  # in the answers to reports
        self.layerwise_calls = 0
        self.windows_us: list[int] = []  # in these calls
        self.stores: list[pb.StoreRequest] = []
        self.decisions: list[pb.Decision] = []
        self.expected: list[pb.ExpectRequest] = []
        self.pins: list[pb.PinRequest] = []
        self.cancelled: set[str] = set()
        self.published: (
            dict[bytes, int] | None
        ) = {}  # key -> lifetime in milliseconds; None: it accepts no publications
        self.entered = threading.Condition()
        self.session = os.urandom(16)
        self._registrations: dict[int, list[_Memory]] = {}
        self._server = grpc.server(
            futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=64
        )
        rpc.add_DataPlaneServicer_to_server(self, self._server)
        self.address = address or f"127.0.0.1:{free_port()}"
        if credentials is None:
            self._server.add_insecure_port(self.address)
        else:
            self._server.add_secure_port(self.address, credentials)
        self._server.start()

    def stop(self) -> None:
        """Die: connections break, and running calls get no answer."""
        stopped = self._server.stop(grace=None)
        self.script.unstall.set()  # not before: stalled calls would answer
        stopped.wait()
        self.forget_registrations()

    def forget_registrations(self) -> None:
        self._registrations.clear()

    def restarted(self) -> "ScriptedDataPlane":
        """Return a new data plane at the same address with the same records; the old one has been stopped."""
        return ScriptedDataPlane(self.address, self.records)

    def wait_for_call(self, method: str, count: int = 1, timeout: float = WAIT_MAX_S) -> None:
        with self.entered:
            assert self.entered.wait_for(lambda: self.calls.count(method) >= count, timeout), f"no call of {method}"

    @property
    def registrations(self) -> int:
        return len(self._registrations)

    def forget_hosts(self) -> None:
        """Forget all hosts, as after a restart."""
        self.session = os.urandom(16)
        self.forget_registrations()

    def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloResponse:
        self._enter("Hello", context)
        self.hellos.append(request)
        return pb.HelloResponse(
            session=self.session,
            version="scripted",
            backend="dict",
            memory_kinds=["shared_memory"],
            differences=self.differences,
        )

    def _enter(self, method: str, context: Any) -> None:
        with self.entered:
            self.calls.append(method)
            self.entered.notify_all()
        if method not in ("Hello", "Statistics") and dict(context.invocation_metadata())[SESSION_KEY] != self.session:
            context.set_trailing_metadata(((HELLO_KEY, "required"),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "say Hello")
        if method in self.script.abort:
            context.abort(self.script.abort[method], "as the script says")
        if method in self.script.stall:
            gone = threading.Event()
            context.add_callback(gone.set)
            while not gone.is_set() and not self.script.unstall.is_set():
                time.sleep(0.005)

    def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        self._enter("Lookup", context)
        self.asked_keys = [list(chain.keys) for chain in request.chains]
        if request.prefetch:
            self.prefetches += 1
            asked = [key for chain in request.chains for key in chain.keys if key in self.script.cold]
            self.script.cold.difference_update(asked[: self.script.brings])
        present = [np.array([key in self.records for key in chain.keys], np.bool_) for chain in request.chains]
        sets = [pack(flags) for flags in present]
        if self.script.lookup_hits is not None:
            lies = self.script.lookup_hits([leading(flags) for flags in present])
            counts = [len(flags) for flags in present] + [0] * len(lies)
            sets = [first(lie, count) for lie, count in zip(lies, counts, strict=False)]
        coming = [
            pack(np.array([key in (self.published or {}) and key not in self.records for key in chain.keys], np.bool_))
            for chain in request.chains
        ]
        published = coming if request.published and self.published is not None else []
        answer = pb.LookupResponse(present=sets, published=published, outcome=pb.OUTCOME_COMPLETE)
        answer.stored_bytes.extend(int(flags.sum()) * self.script.record_bytes for flags in present)
        for chain, packed in zip(request.chains, sets, strict=False):
            flags = np.unpackbits(np.frombuffer(packed, np.uint8), count=len(chain.keys), bitorder="little")
            tiers = [self._tier(key) * there for key, there in zip(chain.keys, flags.tolist(), strict=True)]
            answer.tiers.append(bytes(tiers))
            answer.cold_ms.append(self.script.cold_ms * (pb.TIER_COLD in tiers))
        if self.script.lookup_answer is not None:
            self.script.lookup_answer(answer)
        return answer

    def _tier(self, key: bytes) -> int:
        return pb.TIER_COLD if key in self.script.cold else self.script.tiers.get(key, pb.TIER_STORAGE)

    def Publish(self, request: pb.PublishRequest, context: Any) -> pb.PublishResponse:
        self._enter("Publish", context)
        for key in request.keys if self.published is not None else ():
            if request.lasts_ms:
                self.published[key] = request.lasts_ms
            else:
                self.published.pop(key, None)
        here = pb.REACH_DATA_PLANE if request.plain else pb.REACH_ALL
        reach = pb.REACH_NONE if self.published is None else here
        return pb.PublishResponse(outcome=pb.OUTCOME_COMPLETE, reach=reach)

    def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        self.pins.append(request)
        self._enter("Pin", context)
        return self.script.pin_answer

    def Expect(self, request: pb.ExpectRequest, context: Any) -> pb.ExpectResponse:
        self._enter("Expect", context)
        answer = self.script.expect_answer(request)
        with self.entered:
            self.expected.append(request)
            self.entered.notify_all()
        return answer

    def ReportSteps(self, request: pb.StepReport, context: Any) -> pb.StepAnswer:
        self._enter("ReportSteps", context)
        with self.entered:
            self.reports.append(request)
            self.entered.notify_all()
        return pb.StepAnswer(moved_bytes=self.moved_bytes)

    def RegisterMemory(self, request: pb.RegisterMemoryRequest, context: Any) -> pb.RegisterMemoryResponse:
        self._enter("RegisterMemory", context)
        memory = request.shared_memory
        assert request.layouts and all(len(layout.namespace) == 32 for layout in request.layouts)
        assert "/" not in memory.name
        descriptor = os.open(f"/dev/shm/{memory.name}", os.O_RDWR)
        try:
            mapping = _Mapping(descriptor, memory.size)
            mapping.guard = native.Guard(mapping)
        finally:
            os.close(descriptor)
        memory_id = int.from_bytes(os.urandom(7), "little")
        memories = [_Memory(mapping, layout) for layout in request.layouts]
        self._registrations[memory_id] = memories
        return pb.RegisterMemoryResponse(memory_id=memory_id, chunk_bytes=[each.chunk_bytes for each in memories])

    def _memory(self, request: pb.FetchPart | pb.StoreRequest) -> _Memory | None:
        """Return the memory and layout that a call refers to."""
        memories = self._registrations.get(request.memory_id)
        return None if memories is None else memories[request.layout]

    def ReleaseMemory(self, request: pb.ReleaseMemoryRequest, context: Any) -> pb.ReleaseMemoryResponse:
        self._enter("ReleaseMemory", context)
        self._registrations.pop(request.memory_id, None)
        return pb.ReleaseMemoryResponse()

    def Fetch(self, request: pb.FetchRequest, context: Any) -> pb.FetchResponse:
        memories = [self._memory(part) for part in request.parts]
        self.fetches.extend(request.parts)
        self._enter("Fetch", context)
        known = [memory for memory in memories if memory is not None]
        if len(known) < len(memories):
            return pb.FetchResponse(outcome=pb.OUTCOME_UNKNOWN_MEMORY)
        if "Fetch" in self.script.stall and self.script.write_after_stall:
            for part, memory in zip(request.parts, known, strict=True):
                memory.mapping[part.offset : part.offset + part.length] = b"\xee" * part.length
        ends = time.monotonic() + min(self.script.fetch_delay, request.timeout_ms / 1000)
        while time.monotonic() < ends and request.job_id not in self.cancelled:
            time.sleep(0.002)
        if request.order == pb.ORDER_LAYERS:
            *_, answer = self._deliver_layers(request, known)
        else:
            answer = self._deliver(request, known)
        if self.script.fetch_answer is not None:
            answer = self.script.fetch_answer(answer, request)
        return answer

    def FetchLayers(self, request: pb.FetchRequest, context: Any) -> Iterator[pb.FetchLayersResponse]:
        memories = [self._memory(part) for part in request.parts]
        self.fetches.extend(request.parts)
        self._enter("FetchLayers", context)
        known = [memory for memory in memories if memory is not None]
        if len(known) < len(memories):
            yield pb.FetchLayersResponse(answer=pb.FetchResponse(outcome=pb.OUTCOME_UNKNOWN_MEMORY))
            return
        for said in self._deliver_layers(request, known):
            if isinstance(said, int):
                yield pb.FetchLayersResponse(layers=said)
            elif self.script.answers_streams:
                yield pb.FetchLayersResponse(answer=said)

    def _deliver(self, request: pb.FetchRequest, memories: list[_Memory]) -> pb.FetchResponse:
        if request.job_id in self.cancelled:
            return pb.FetchResponse(outcome=pb.OUTCOME_CANCELLED)
        if self.script.fetch_delay > request.timeout_ms / 1000:
            return pb.FetchResponse(outcome=pb.OUTCOME_DEADLINE)
        answer = pb.FetchResponse(outcome=pb.OUTCOME_COMPLETE)
        number = 0  # of the chunk, in all parts
        for part, memory in zip(request.parts, memories, strict=True):
            chunks = 0
            for index, key in enumerate(part.keys):
                begin = part.offset + index * memory.chunk_bytes
                if self.script.fail_fetch_at == number:
                    memory.mapping[begin : begin + memory.chunk_bytes] = b"\x7f" * memory.chunk_bytes
                    answer.outcome = self.script.fail_outcome
                elif key not in self.records:
                    answer.outcome = pb.OUTCOME_ABSENT
                elif number >= self.script.batch_chunks or begin + memory.chunk_bytes > part.offset + part.length:
                    answer.outcome = pb.OUTCOME_BATCH_FULL
                if answer.outcome != pb.OUTCOME_COMPLETE:
                    break
                memory.mapping[begin : begin + memory.chunk_bytes] = self.records[key]
                chunks, number = chunks + 1, number + 1
                if request.HasField("progress") and len(request.parts) == 1:
                    memory.mapping[request.progress : request.progress + 4] = chunks.to_bytes(4, "little")
                    if self.script.after_chunk is not None:
                        self.script.after_chunk(chunks)
            delivered = pieces(memory.layers, chunks, len(part.keys))
            if part.wanted:
                shape = memory.layers, len(part.keys)
                delivered = pack(unpack(delivered, *shape) & unpack(part.wanted, *shape))
            answer.delivered.append(delivered)
            answer.delivered_bytes += chunks * memory.chunk_bytes
        answer.fetched_bytes = answer.delivered_bytes // 2
        return answer

    def _deliver_layers(self, request: pb.FetchRequest, memories: list[_Memory]) -> Iterator[Any]:
        """Yield the number of leading layers in place of all parts, and finally the answer."""
        parts, first_layer = request.parts, request.parts[0].first_layer
        self.layerwise_calls += 1
        self.windows_us.append(request.window_us)
        there = [
            np.zeros((memory.layers, len(part.keys)), np.bool_) for part, memory in zip(parts, memories, strict=True)
        ]
        wanted = [
            unpack(part.wanted, *each.shape) if part.wanted else ~each for part, each in zip(parts, there, strict=True)
        ]
        window = parts[0].layers or memories[0].layers
        ends = time.monotonic() + request.timeout_ms / 1000
        answer = pb.FetchResponse(outcome=pb.OUTCOME_COMPLETE)
        for layer in range(first_layer, first_layer + window):
            time.sleep(self.script.layer_delay)
            if self.script.before_layer is not None:
                self.script.before_layer(layer)
            if request.job_id in self.cancelled or time.monotonic() > ends:
                answer.outcome = pb.OUTCOME_CANCELLED if request.job_id in self.cancelled else pb.OUTCOME_DEADLINE
                break
            if layer - first_layer >= self.script.batch_layers:
                answer.outcome = pb.OUTCOME_BATCH_FULL
                break
            for index, (part, memory) in enumerate(zip(parts, memories, strict=True)):
                fails = index == len(parts) - 1 and layer == self.script.fail_layer
                self._deliver_layer(answer, part, memory, there[index], wanted[index], layer, fails=fails)
            if answer.outcome == pb.OUTCOME_COMPLETE:
                if request.HasField("progress"):
                    memory.mapping[request.progress : request.progress + 4] = (layer + 1).to_bytes(4, "little")
                yield layer + 1
        answer.delivered.extend(map(pack, there))
        yield answer

    def _deliver_layer(
        self,
        answer: pb.FetchResponse,
        part: pb.FetchPart,
        memory: _Memory,
        there: Any,
        wanted: Any,
        layer: int,
        *,
        fails: bool,
    ) -> None:
        size, window = memory.chunk_bytes // memory.layers, part.layers or memory.layers
        for chunk in np.flatnonzero(wanted[layer]).tolist():
            begin = part.offset + (chunk * window + layer - part.first_layer) * size
            if part.keys[chunk] not in self.records:
                answer.outcome = pb.OUTCOME_ABSENT
            elif fails and chunk == self.script.fail_fetch_at:
                memory.mapping[begin : begin + size] = b"\x7f" * size
                answer.outcome = self.script.fail_outcome
            else:
                memory.mapping[begin : begin + size] = self.records[part.keys[chunk]][layer * size :][:size]
                there[layer, chunk] = True
                continue
            wanted[:, chunk:] = False
            break

    def Store(self, request: pb.StoreRequest, context: Any) -> pb.StoreResponse:
        memory = self._memory(request)
        self.stores.append(request)
        self._enter("Store", context)
        if memory is None:
            return pb.StoreResponse(outcome=pb.OUTCOME_UNKNOWN_MEMORY)
        if self.script.store_outcome is not None:
            return pb.StoreResponse(outcome=self.script.store_outcome)
        stored = np.array([key not in self.script.not_storable for key in request.keys])
        for index in np.flatnonzero(stored):
            begin = request.offset + int(index) * memory.chunk_bytes
            self.records.setdefault(request.keys[index], memory.mapping[begin : begin + memory.chunk_bytes])
        raw = int(stored.sum()) * memory.chunk_bytes
        return pb.StoreResponse(
            stored=pack(stored),
            outcome=pb.OUTCOME_COMPLETE if stored.all() else pb.OUTCOME_NOT_STORABLE,
            raw_bytes=raw,
            stored_bytes=raw // 2,
        )

    def Decided(self, request: pb.Decision, context: Any) -> pb.DecidedResponse:
        self.decisions.append(request)
        self._enter("Decided", context)
        return pb.DecidedResponse()

    def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        self.cancelled.add(request.job_id)  # before a test that waits for the call goes on
        self._enter("Cancel", context)
        return pb.CancelResponse(found=True)

    def Statistics(self, request: pb.StatisticsRequest, context: Any) -> pb.StatisticsResponse:
        self._enter("Statistics", context)
        return pb.StatisticsResponse(version="scripted", backend="dict", registrations=len(self._registrations))

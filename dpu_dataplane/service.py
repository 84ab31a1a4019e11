"""The gRPC service: from messages to jobs, and back."""

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message
from prometheus_client import Histogram

from dpu_dataplane.batches import Buffers, encoded_bound
from dpu_dataplane.catalog import Catalog, Looked
from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.engines import Engines
from dpu_dataplane.fetching import Fetcher
from dpu_dataplane.hosts import HostTable, Session
from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.jobs import ENDINGS, Job, JobTable, QueueFull, ending_of
from dpu_dataplane.metrics import Metrics, outcome_name, resident_bytes
from dpu_dataplane.progress import PROGRESS_BYTES
from dpu_dataplane.queues import Queues
from dpu_dataplane.registrations import (
    DeviceGivenUpError,
    OverlapError,
    Registration,
    RegistrationError,
    Registrations,
    TooManyError,
)
from dpu_dataplane.repeats import Repeats, address_of
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.placing import PageOrder, Placing
from dpu_dataplane.storing import Storer
from dpu_dataplane.tracing import NotTraceable, Tracer
from dpu_dataplane.validation import InvalidCall, Validator
from shadowserve import __version__, native
from shadowserve.chunk import ChunkLayout
from shadowserve.pieces import Flags, pack
from shadowserve.proto import PROTOCOL_VERSION, dataplane_pb2_grpc
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["DataPlaneService"]

_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)
_Context = grpc.aio.ServicerContext[Any, Any]

REPORT_INTERVAL: Final = 10.0
_UINT32_MAX: Final = (1 << 32) - 1
_FETCHERS: Final = {
    pb.PURPOSE_REQUEST: Mover.FETCH,
    pb.PURPOSE_PREEMPTION: Mover.FETCH,
    pb.PURPOSE_OFFLOADING_TIER: Mover.TIER_LOAD,
}
_STORERS: Final = {
    pb.PURPOSE_REQUEST: Mover.STORE,
    pb.PURPOSE_PREEMPTION: Mover.PREEMPTION_SAVE,
    pb.PURPOSE_OFFLOADING_TIER: Mover.TIER_STORE,
}
_REPORTED = (pb.OUTCOME_DEADLINE, pb.OUTCOME_STORAGE_REFUSED, pb.OUTCOME_NOT_STORABLE)

logger = logging.getLogger(__name__)


class DataPlaneService(dataplane_pb2_grpc.DataPlaneServicer):
    """Implements ``proto/dataplane.proto``. Every answer to Lookup, Fetch and Store carries exactly one outcome."""

    def __init__(
        self,
        config: DataPlaneConfig,
        catalog: Catalog,
        fetcher: Fetcher,
        storer: Storer,
        registrations: Registrations,
        hosts: HostTable,
        buffers: Buffers,
        metrics: Metrics,
        tracer: Tracer,
        repeats: Repeats,
        placing: Placing | None,
        budget: InterferenceBudget,
    ) -> None:
        self._config = config
        self._budget = budget
        devices = config.tiers is not None and bool(config.tiers.devices) and "shared_memory" in registrations.kinds
        self._placing = placing if devices else None
        self._tracer = tracer
        self._repeats = repeats
        self._catalog = catalog
        self._fetcher = fetcher
        self._storer = storer
        self._registrations = registrations
        self.hosts = hosts
        self._buffers = buffers
        self._metrics = metrics
        self._validate = Validator(config)
        self._queues = Queues(config.hosts_max, time.monotonic)
        self._started_s = time.monotonic()
        self._engines = Engines(registrations.namespaces, repeats)
        self._reported: dict[tuple[str, int], float] = {}
        self.jobs = JobTable()

    # ---- Calls -------------------------------------------------------------------------------------------------------

    async def Hello(self, request: pb.HelloRequest, context: _Context) -> pb.HelloResponse:  # noqa: N802
        """Take a host, or say why not."""
        try:
            return self._hello(request, context)
        except InvalidCall as error:
            refused = f"refused {request.process[:80] or 'a host'} at {context.peer()}: {error}"
            self._repeats.tell(logging.WARNING, "refused", address_of(context.peer()), refused)
            await context.abort(error.code, str(error))
        raise AssertionError("abort() always raises")

    async def Lookup(self, request: pb.LookupRequest, context: _Context) -> pb.LookupResponse:  # noqa: N802
        """Which chunks of each chain storage holds."""
        return await self._answer(context, self._lookup, request)

    async def Publish(self, request: pb.PublishRequest, context: _Context) -> pb.PublishResponse:  # noqa: N802
        """Tell storage which chunks will be there soon."""
        return await self._answer(context, self._publish, request)

    async def Expect(self, request: pb.ExpectRequest, context: _Context) -> pb.ExpectResponse:  # noqa: N802
        """Take what waits in an engine's queue."""
        return await self._answer(context, self._expect, request)

    async def ReportSteps(self, request: pb.StepReport, context: _Context) -> pb.StepAnswer:  # noqa: N802
        """Take what an engine reports of its steps."""
        return await self._answer(context, self._report_steps, request)

    async def RegisterMemory(  # noqa: N802
        self, request: pb.RegisterMemoryRequest, context: _Context
    ) -> pb.RegisterMemoryResponse:
        """Make memory known."""
        return await self._answer(context, self._register, request)

    async def ReleaseMemory(  # noqa: N802
        self, request: pb.ReleaseMemoryRequest, context: _Context
    ) -> pb.ReleaseMemoryResponse:
        """Forget memory, once no job uses it."""
        return await self._answer(context, self._release, request)

    async def Fetch(self, request: pb.FetchRequest, context: _Context) -> pb.FetchResponse:  # noqa: N802
        """One batch."""
        return await self._answer(context, self._fetch, request)

    async def FetchPages(self, request: pb.FetchPagesRequest, context: _Context) -> pb.FetchResponse:  # noqa: N802
        """Chunks of pages, from devices of this machine into paged memory."""
        return await self._answer(context, self._fetch_pages, request)

    async def FetchLayers(  # noqa: N802
        self, request: pb.FetchRequest, context: _Context
    ) -> AsyncIterator[pb.FetchLayersResponse]:
        """One batch in the order of layers, and meanwhile how far it is."""
        said: asyncio.Queue[int | None] = asyncio.Queue()  # each number of layers once at most
        fetch = functools.partial(self._fetch, tell=said.put_nowait)
        fetching = asyncio.ensure_future(self._answer(context, fetch, request))
        fetching.add_done_callback(lambda _: said.put_nowait(None))
        try:
            while (layers := await said.get()) is not None:
                yield pb.FetchLayersResponse(layers=layers)
            yield pb.FetchLayersResponse(answer=await fetching)
        finally:
            fetching.cancel()
            await asyncio.wait({fetching})

    async def Store(self, request: pb.StoreRequest, context: _Context) -> pb.StoreResponse:  # noqa: N802
        """Chunks to records."""
        return await self._answer(context, self._store, request)

    async def Cancel(self, request: pb.CancelRequest, context: _Context) -> pb.CancelResponse:  # noqa: N802
        """End a job early."""
        return await self._answer(context, self._cancel, request)

    async def Statistics(self, request: pb.StatisticsRequest, context: _Context) -> pb.StatisticsResponse:  # noqa: N802
        """What has been done so far."""
        metrics = self._metrics
        storage, connected = self._catalog.storage
        return pb.StatisticsResponse(
            version=__version__,
            backend=native.backends()[self._config.backend].label,
            batches=metrics.batches,
            registrations=len(self._registrations),
            buffer_bytes=self._buffers.total,
            resident_bytes=resident_bytes(),
            stages=[
                pb.StageStatistics(
                    stage=stage.stage,
                    items=stage.items,
                    input_bytes=stage.input_bytes,
                    output_bytes=stage.output_bytes,
                    busy_ns=stage.busy_ns,
                )
                for stage in metrics.stages()
            ],
            fetch_outcomes=dict(metrics.fetches),
            store_outcomes=dict(metrics.stores),
            fetched_bytes=metrics.fetched_bytes,
            delivered_bytes=metrics.delivered_bytes,
            stored_raw_bytes=metrics.stored_raw_bytes,
            stored_bytes=metrics.stored_bytes,
            engines=self._engines.running(),
            lookup_keys=metrics.lookup_keys,
            lookup_hits=metrics.lookup_hits,
            storage=storage,
            storage_connected=connected,
            up_seconds=time.monotonic() - self._started_s,
        )

    async def Trace(  # noqa: N802
        self, request: pb.TraceRequest, context: _Context
    ) -> AsyncIterator[pb.TraceResponse]:
        """Record the next fetches."""
        try:
            with self.hosts.call(context) as caller:
                timeout = self._validate.timeout(request.timeout_ms)
                fetches = self._validate.count("fetches", request.fetches)
                with self._tracer.recording(caller.owner, fetches, decides=caller.host.decides) as recording:
                    yield pb.TraceResponse()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(recording.done.wait(), timeout)
                parts = list(self._tracer.result(recording))
        except InvalidCall as error:
            await context.abort(error.code, str(error), error.metadata)
        except NotTraceable as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        for part in parts:
            yield part

    async def Decided(self, request: pb.Decision, context: _Context) -> pb.DecidedResponse:  # noqa: N802
        """Take what a host has decided, for a recording of its fetches."""
        return await self._answer(context, self._decided, request)

    # ---- What they do ------------------------------------------------------------------------------------------------

    async def _answer(
        self, context: _Context, handle: Callable[[_Request, Session], Awaitable[_Response]], request: _Request
    ) -> _Response:
        """Run a handler for the host that calls; turn what is wrong with the call into a gRPC status."""
        try:
            with self.hosts.call(context) as caller:
                return await handle(request, caller)
        except InvalidCall as error:
            await context.abort(error.code, str(error), error.metadata)
        except TooManyError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except OverlapError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except RegistrationError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except DeviceGivenUpError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except QueueFull:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "as many jobs wait as may: treat it as a miss, or raise fetch_queue"
            )
        raise AssertionError("abort() always raises")

    async def _decided(self, request: pb.Decision, caller: Session) -> pb.DecidedResponse:
        self._validate.decision(request)
        caller.host.decides = True
        self._tracer.decided(caller.owner, request)
        return pb.DecidedResponse()

    async def _expect(self, request: pb.ExpectRequest, caller: Session) -> pb.ExpectResponse:
        arrivals = self._validate.expected(request)
        if self._config.tiers is None:
            return pb.ExpectResponse(unused=True)
        taken = self._queues.take(caller.owner, request, arrivals)
        self._catalog.expect(self._queues.expected())
        return pb.ExpectResponse(again=not taken)

    async def _report_steps(self, request: pb.StepReport, caller: Session) -> pb.StepAnswer:
        self._validate.steps(request)
        return self._budget.report(caller.owner, request)

    def _hello(self, request: pb.HelloRequest, context: _Context) -> pb.HelloResponse:
        self._validate.hello(request)
        if request.HasField("layout"):
            self._check_shape(self._validate.layout(request.layout), request.chunk_bytes)
        session, new = self.hosts.enter(request, context)
        if new:
            logger.info("connected: %s", session.host)
        backend = native.backends()[self._config.backend]
        return pb.HelloResponse(
            session=session.token,
            protocol_version=PROTOCOL_VERSION,
            version=__version__,
            backend=backend.name,
            emulated=backend.emulated,
            device=backend.description,
            memory_kinds=self._registrations.kinds,
            page_devices=self._placing is not None,
            differences=self._engines.enter(request) if request.HasField("engine") else (),
        )

    def _check_shape(self, layout: ChunkLayout, chunk_bytes: int) -> None:
        """Refuse a host that counts otherwise than this data plane, or than others in the same namespace."""
        problem = ""
        if chunk_bytes != layout.raw_bytes:
            problem = f"the host counts {chunk_bytes} bytes in a chunk, this data plane {layout.raw_bytes}"
        elif (other := self._registrations.other_layout(layout)) is not None:
            problem = (
                f"the host says that chunks of namespace {layout.namespace.hex()[:16]} are {layout}, and memory "
                f"that is registered already says {other}"
            )
        if problem:
            raise InvalidCall(
                f"{problem}; install the same release of ShadowServe on all hosts and data planes",
                grpc.StatusCode.FAILED_PRECONDITION,
            )
        self._check_buffers(layout)

    async def _lookup(self, request: pb.LookupRequest, caller: Session) -> pb.LookupResponse:
        chains = self._validate.chains(request.chains)
        job = Job(caller.owner, "", self._validate.timeout(request.timeout_ms))
        published: list[bytes] = []
        found: list[Looked] = []
        detail = ""
        with self._metrics.lookup_seconds.time():
            try:
                look = self._look(chains, published=request.published, prefetch=request.prefetch)
                found, coming = await job.within(look, "asking storage for heads")
                published = [
                    pack(each & ~there.present) for each, there in zip(coming or (), found, strict=bool(coming))
                ]
                outcome = pb.OUTCOME_COMPLETE
            except ENDINGS as error:
                outcome, detail = ending_of(error)
            except Exception as error:
                outcome, detail = self._internal("Lookup", error)
        self._metrics.lookups[outcome_name(outcome)] += 1
        response = pb.LookupResponse(
            present=[pack(each.present) for each in found],
            published=published,
            tiers=[each.tiers.tobytes() for each in found],
            stored_bytes=[each.stored_bytes for each in found],
            cold_ms=[min(each.cold_ms, _UINT32_MAX) for each in found],
            outcome=outcome,
            detail=detail,
        )
        self._report(response)
        return response

    async def _look(
        self, chains: Sequence[tuple[bytes, Sequence[bytes]]], *, published: bool, prefetch: bool
    ) -> tuple[list[Looked], list[Flags] | None]:
        """Return what is there of each chain and, if wanted, what is published: both in one round trip.

        What is published is asked first: the other way round, what is stored in between would be neither. So is storage
        to bring what is cold, which tells with the lookup's answer what is left of it.
        """

        async def nothing() -> None:
            return None

        first = self._catalog.prefetch(chains) if prefetch else nothing()
        second = self._catalog.published(chains) if published else nothing()
        _, coming, found = await asyncio.gather(first, second, self._catalog.lookup(chains))
        return found, coming

    async def _publish(self, request: pb.PublishRequest, caller: Session) -> pb.PublishResponse:
        keys = self._validate.keys("keys", list(request.keys))
        job = Job(caller.owner, "", self._validate.timeout(request.timeout_ms))
        reach = pb.REACH_ALL
        try:
            plain = request.plain and self._placing is not None  # as they will be stored
            publishing = self._catalog.publish(caller.owner, keys, request.lasts_ms, plain=plain)
            reach = await job.within(publishing, "publishing chunks to storage")
            outcome, detail = pb.OUTCOME_COMPLETE, ""
        except ENDINGS as error:
            outcome, detail = ending_of(error)
        except Exception as error:
            outcome, detail = self._internal("Publish", error)
        response = pb.PublishResponse(outcome=outcome, detail=detail, reach=reach)
        self._report(response)
        return response

    async def _register(self, request: pb.RegisterMemoryRequest, caller: Session) -> pb.RegisterMemoryResponse:
        layouts = self._validate.layouts(request.layouts)
        for layout in layouts:
            self._check_buffers(layout)
        registration = await self._registrations.register(request, layouts, caller.owner, caller.token)
        if registration.paging is not None and (placing := self._placing) is not None:
            memory = registration.memory
            registration.at_end(functools.partial(placing.unregister, memory))
            await asyncio.to_thread(placing.register, memory)
        self._repeats.tell(
            logging.INFO,
            "registered",
            caller.owner,
            f"registered registration {registration.memory_id:016x}: {registration.size} bytes of "
            f"{request.WhichOneof('memory')}, {len(layouts)} layouts",
        )
        return pb.RegisterMemoryResponse(
            memory_id=registration.memory_id, chunk_bytes=[layout.raw_bytes for layout in layouts]
        )

    def _check_buffers(self, layout: ChunkLayout) -> None:
        """Refuse a layout of which not even one chunk fits: every fetch of it would end with nothing."""
        symbols = layout.layers * layout.kinds * layout.tokens * layout.token_decoded_bytes
        slice_bytes = int(self._config.slice_bytes)
        bound = max(encoded_bound(layout, native.Codec(codec), slice_bytes) for codec in self._catalog.codecs)
        for name, size, needed in (
            ("decompression_buffer_bytes", self._buffers.decompression, bound),
            ("dequantization_buffer_bytes", self._buffers.dequantization, symbols),
            ("dma_source_buffer_bytes", self._buffers.dma_source, layout.raw_bytes),
            ("store_buffer_bytes", self._buffers.store, bound),
        ):
            if size is not None and size < needed:
                raise InvalidCall(
                    f"layout: one chunk needs up to {needed} bytes of {name}, which is {size}; raise it, or use fewer "
                    "tokens in a chunk",
                    grpc.StatusCode.FAILED_PRECONDITION,
                )

    async def _release(self, request: pb.ReleaseMemoryRequest, caller: Session) -> pb.ReleaseMemoryResponse:
        await self._registrations.release(request.memory_id, caller.token)
        return pb.ReleaseMemoryResponse()

    async def _cancel(self, request: pb.CancelRequest, caller: Session) -> pb.CancelResponse:
        return pb.CancelResponse(found=self.jobs.cancel(caller.token, request.job_id))

    async def _fetch(
        self, request: pb.FetchRequest, caller: Session, tell: Callable[[int], None] | None = None
    ) -> pb.FetchResponse:
        parts = self._validate.parts(
            request, lambda name: self._registrations.get(name, caller.token), streamed=tell is not None
        )

        async def work(job: Job) -> pb.FetchResponse:
            if isinstance(parts, int):
                return pb.FetchResponse(outcome=pb.OUTCOME_UNKNOWN_MEMORY, detail=_unknown(parts))
            with contextlib.ExitStack() as claims:
                regions = [(part.registration, part.offset, part.length) for part in parts]
                word = None
                if request.HasField("progress"):
                    regions.append((parts[0].registration, request.progress, PROGRESS_BYTES))
                    word = parts[0].registration.region(request.progress, PROGRESS_BYTES)
                for region in regions:
                    claims.enter_context(self._registrations.claim(*region, writing=True))
                try:
                    response = await self._fetcher.run(
                        job,
                        parts,
                        request.order == pb.ORDER_LAYERS,
                        word,
                        request.window_us / 1e6,
                        _FETCHERS[request.purpose],
                        tell,
                    )
                    for part in parts:
                        self._check_reach(part.registration, response.outcome)
                    return response
                except Exception as error:
                    if isinstance(error, QueueFull | RegistrationError):
                        raise
                    outcome, detail = self._internal("Fetch", error)
                    return pb.FetchResponse(outcome=outcome, detail=detail)

        return await self._run(caller, request, work, self._metrics.fetches, self._metrics.fetch_seconds)

    async def _fetch_pages(self, request: pb.FetchPagesRequest, caller: Session) -> pb.FetchResponse:
        registration = self._registrations.get(request.memory_id, caller.token)
        pages = None if registration is None else self._validate.pages(request, registration)

        async def work(job: Job) -> pb.FetchResponse:
            if registration is None or pages is None:
                return pb.FetchResponse(outcome=pb.OUTCOME_UNKNOWN_MEMORY, detail=_unknown(request.memory_id))
            with self._registrations.claim(registration, 0, registration.size, writing=True):
                return await self._place(job, request, registration, *pages)

        return await self._run(caller, request, work, self._metrics.fetches, self._metrics.fetch_seconds)

    async def _place(
        self,
        job: Job,
        request: pb.FetchPagesRequest,
        registration: Registration,
        keys: Sequence[bytes],
        blocks: npt.NDArray[np.uint32],
    ) -> pb.FetchResponse:
        (layout,), paging = registration.layouts, registration.paging
        assert paging is not None
        if self._placing is None:
            return pb.FetchResponse(outcome=pb.OUTCOME_ABSENT, detail="this data plane has no devices")
        word = registration.address + request.progress if request.HasField("progress") else 0
        order = PageOrder(keys, layout, registration.address, paging.first, paging.stride, blocks, word)
        try:
            delivered, rotten, stop = await self._placing.place(job, order)
        except ENDINGS as error:  # before anything was begun
            outcome, detail = ending_of(error)
            return pb.FetchResponse(outcome=outcome, detail=detail)
        if stop is not None:
            outcome, detail = stop.outcome, str(stop)
        elif delivered.all():
            outcome, detail = pb.OUTCOME_COMPLETE, ""
        elif rotten:
            outcome, detail = pb.OUTCOME_CORRUPT, f"chunk {keys[rotten[0]].hex()}: pages differ from checksums"
        else:
            outcome, detail = pb.OUTCOME_ABSENT, "not all of it lies on devices as pages"
        size = int(delivered.sum()) * layout.raw_bytes // layout.layers
        self._metrics.fetched_bytes += size
        self._metrics.delivered_bytes += size
        return pb.FetchResponse(
            delivered=[pack(delivered)], outcome=outcome, detail=detail, fetched_bytes=size, delivered_bytes=size
        )

    async def _store(self, request: pb.StoreRequest, caller: Session) -> pb.StoreResponse:
        keys = self._validate.keys("keys", list(request.keys))
        parents = self._validate.parents(list(request.parents), len(keys))
        self._validate.purpose(request.purpose)
        registration = self._registrations.get(request.memory_id, caller.token)
        layout = None
        if registration is not None:
            layout = self._validate.layout_of(registration, request.layout)
            self._validate.offset(layout, request.offset)

        async def work(job: Job) -> pb.StoreResponse:
            if registration is None or layout is None:
                return pb.StoreResponse(outcome=pb.OUTCOME_UNKNOWN_MEMORY, detail=_unknown(request.memory_id))
            length = len(keys) * layout.raw_bytes
            with self._registrations.claim(registration, request.offset, length, writing=False):
                try:
                    to_store = (request.offset, keys, parents, request.lasts_ms)
                    plain = request.plain and self._placing is not None  # raw bytes would only cost the link
                    mover = _STORERS[request.purpose]
                    response = await self._storer.run(job, registration, layout, *to_store, plain=plain, mover=mover)
                    self._check_reach(registration, response.outcome)
                    return response
                except Exception as error:
                    if isinstance(error, QueueFull | RegistrationError):
                        raise
                    outcome, detail = self._internal("Store", error)
                    return pb.StoreResponse(outcome=outcome, detail=detail)

        return await self._run(caller, request, work, self._metrics.stores, self._metrics.store_seconds)

    def _check_reach(self, registration: Registration, outcome: pb.Outcome) -> None:
        """Drop a registration that could not be reached: whoever still owns it registers it anew."""
        if outcome == pb.OUTCOME_DEVICE and not self._registrations.given_up:
            forgotten = f"registration {registration.memory_id:016x} could not be reached: forgotten"
            self._repeats.tell(logging.WARNING, "unreachable", registration.owner, forgotten)
            self._registrations.lost(registration)

    async def _run(
        self,
        caller: Session,
        request: Any,
        work: Callable[[Job], Coroutine[Any, Any, _Response]],
        counts: Counter[str],
        seconds: Histogram,
    ) -> _Response:
        """Run a job to its end, even if the caller goes away: then it is cancelled, and its end awaited."""
        job_id = self._validate.job_id(request.job_id)
        timeout = self._validate.timeout(request.timeout_ms)
        begin = time.monotonic()
        try:
            with self.jobs.enter(caller.token, caller.owner, job_id, timeout) as job:
                task = asyncio.create_task(work(job))
                try:
                    response = await asyncio.shield(task)
                except asyncio.CancelledError:
                    job.cancel()
                    await asyncio.wait({task})
                    if not task.exception():
                        counts[outcome_name(task.result().outcome)] += 1  # type: ignore[attr-defined]
                    raise
        except KeyError:
            raise InvalidCall(
                f"job_id {job_id!r} is in use by a job in progress", grpc.StatusCode.ALREADY_EXISTS
            ) from None
        counts[outcome_name(response.outcome)] += 1  # type: ignore[attr-defined]
        self._report(response)
        seconds.observe(time.monotonic() - begin)
        return response

    def _report(self, response: Any) -> None:
        """Log why a call failed, for outcomes that nobody else logs; at most one line of a kind in REPORT_INTERVAL."""
        kind = (type(response).__name__.removesuffix("Response"), response.outcome)
        now = time.monotonic()
        if response.outcome in _REPORTED and now >= self._reported.get(kind, now - REPORT_INTERVAL) + REPORT_INTERVAL:
            self._reported[kind] = now
            logger.warning("%s ended with %s: %s", kind[0], outcome_name(response.outcome), response.detail)

    def _internal(self, call: str, error: Exception) -> tuple[pb.Outcome, str]:
        detail = f"{call} met a bug: {type(error).__name__}: {error}"
        if self._repeats.tell(logging.ERROR, f"{call}: {type(error).__name__}", "", f"{detail}; please report it"):
            logger.exception("where it is")
        return pb.OUTCOME_INTERNAL, detail


def _unknown(memory_id: int) -> str:
    return f"there is no registration {memory_id:016x} (any more): register again"

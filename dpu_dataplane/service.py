"""The gRPC service: converts messages to jobs, and results to messages."""

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

import grpc
from prometheus_client import Histogram, generate_latest

from dpu_dataplane.batches import encoded_bound
from dpu_dataplane.catalog import ChainLookup
from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.engines import Engines
from dpu_dataplane.fetching import Fetch, Fetcher
from dpu_dataplane.hosts import HostTable, Session
from dpu_dataplane.jobs import ENDINGS, CallError, Job, JobTable, Stop, ending_of
from dpu_dataplane.log_limiter import LogLimiter, address_of
from dpu_dataplane.metrics import outcome_name, resident_bytes
from dpu_dataplane.plan import PROGRESS_BYTES
from dpu_dataplane.queues import Queues
from dpu_dataplane.registrations import Registration, Registrations
from dpu_dataplane.shared_rate import Mover
from dpu_dataplane.sources.source import Chain, PageRequest
from dpu_dataplane.storing import Store, Storer
from dpu_dataplane.validation import InvalidCall, Validator
from shadowserve import __version__, native, spans
from shadowserve.chunk import ChunkLayout
from shadowserve.pieces import Flags, pack
from shadowserve.proto import PROTOCOL_VERSION, dataplane_pb2_grpc
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.tier import Tier

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Answer = TypeVar("_Answer", pb.LookupResponse, pb.PublishResponse, pb.PinResponse, pb.FetchResponse, pb.StoreResponse)
"""An answer with an outcome."""
_Context = grpc.aio.ServicerContext[Any, Any]

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
_STATISTICS: Final = (
    "batches", "fetched_bytes", "delivered_bytes", "stored_raw_bytes", "stored_bytes", "lookup_keys", "lookup_hits"
)  # fmt: skip
"""Totals in the answer to Statistics."""
_LOGGED: Final = (pb.OUTCOME_DEADLINE, pb.OUTCOME_STORAGE_REFUSED, pb.OUTCOME_NOT_STORABLE)

logger = logging.getLogger(__name__)


class _CallCounts(NamedTuple, Generic[_Answer]):
    call: str
    response: Callable[..., _Answer]
    outcomes: Counter[str]
    seconds: Histogram


def _facts(response: Any) -> dict[str, Any]:
    """Return a span's attributes for an answer: outcome, bytes, and for a lookup the chunks found by tier."""
    facts = {name: getattr(response, name) for name in ("fetched_bytes", "delivered_bytes") if hasattr(response, name)}
    if hasattr(response, "outcome"):
        facts |= {"outcome": outcome_name(response.outcome), "detail": response.detail}
    if isinstance(response, pb.LookupResponse):
        found = Counter(b"".join(response.tiers))
        facts |= {f"chunks.{Tier(tier).label}": count for tier, count in found.items() if tier != Tier.NONE}
    return facts


def _call(
    handle: "Callable[[DataPlaneService, _Request, Session], Awaitable[_Response]]",
) -> "Callable[[DataPlaneService, _Request, _Context], Awaitable[_Response]]":
    """Make the gRPC method of a handler, which gets the session of the caller."""

    @functools.wraps(handle)
    async def method(service: "DataPlaneService", request: _Request, context: _Context) -> _Response:
        return await service.answer(context, functools.partial(handle, service), request)

    return method


class DataPlaneService(dataplane_pb2_grpc.DataPlaneServicer):
    """Implements ``proto/dataplane.proto``. Every answer to Lookup, Fetch and Store has exactly one outcome."""

    def __init__(
        self,
        config: DataPlaneConfig,
        fetcher: Fetcher,
        storer: Storer,
        registrations: Registrations,
        hosts: HostTable,
        log: LogLimiter,
    ) -> None:
        self._config = config
        self._fetcher, self._storer = fetcher, storer
        self._registrations = registrations
        self._log = log
        self._catalog, self._tracer, self._buffers = fetcher.catalog, fetcher.tracer, fetcher.buffers
        self._budget = fetcher.resources.budget
        self._metrics = metrics = fetcher.resources.metrics
        self._page_loader = fetcher.source.page_loader if "shared_memory" in registrations.kinds else None
        self._validate = Validator()
        self._queues = Queues(config.hosts_max, time.monotonic)
        self._started_s = time.monotonic()
        self.engines = Engines(registrations.namespaces, log)
        self._fetch_counts = _CallCounts("Fetch", pb.FetchResponse, metrics.fetches, metrics.fetch_seconds)
        self._store_counts = _CallCounts("Store", pb.StoreResponse, metrics.stores, metrics.store_seconds)
        self.hosts = hosts
        self.jobs = JobTable()

    async def answer(
        self, context: _Context, handle: Callable[[_Request, Session], Awaitable[_Response]], request: _Request
    ) -> _Response:
        """Run a handler for the calling host; convert errors in the call to a gRPC status."""
        try:
            with self.hosts.call(context) as caller:
                if not spans.recording():
                    return await handle(request, caller)
                parent = str(dict(context.invocation_metadata() or ()).get(spans.HEADER, ""))
                name = type(request).__name__.removesuffix("Request").lower()
                with spans.span(f"dpu.{name}", parent, kind="server") as span:
                    response = await handle(request, caller)
                    span.set(**_facts(response))
                    return response
        except CallError as error:
            await context.abort(error.code, str(error), error.metadata)
        raise AssertionError("abort() always raises")

    # ---- Hosts, engines and metrics

    async def Hello(self, request: pb.HelloRequest, context: _Context) -> pb.HelloResponse:  # noqa: N802
        """Open a session of a host, or refuse the host with a reason."""
        try:
            return self._hello(request, context)
        except InvalidCall as error:
            refused = f"refused {request.process[:80] or 'a host'} at {context.peer()}: {error}"
            self._log.log(logging.WARNING, "refused", address_of(context.peer()), refused)
            await context.abort(error.code, str(error))
        raise AssertionError("abort() always raises")

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
            page_devices=self._page_loader is not None,
            differences=self.engines.enter(request) if request.HasField("engine") else (),
        )

    def _check_shape(self, layout: ChunkLayout, chunk_bytes: int) -> None:
        """Refuse a host that computes another chunk size, or another layout in the same namespace."""
        problem = ""
        if chunk_bytes != layout.raw_bytes:
            problem = f"a chunk has {chunk_bytes} bytes for the host and {layout.raw_bytes} for this data plane"
        elif (other := self._registrations.other_layout(layout)) is not None:
            problem = (
                f"the host has layout {layout} for namespace {layout.namespace.hex()[:16]}, and registered memory has "
                f"layout {other}"
            )
        if problem:
            raise InvalidCall(
                f"{problem}; install the same release of ShadowServe on all hosts and data planes",
                grpc.StatusCode.FAILED_PRECONDITION,
            )
        self._check_buffers(layout)

    def _check_buffers(self, layout: ChunkLayout) -> None:
        """Refuse a layout whose chunks do not fit the buffers: no fetch of it would deliver anything."""
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

    @_call
    async def Expect(self, request: pb.ExpectRequest, caller: Session) -> pb.ExpectResponse:  # noqa: N802
        """Update the waiting requests of an engine."""
        arrivals = self._validate.expected(request)
        if self._config.tiers is None:
            return pb.ExpectResponse(unused=True)
        complete = self._queues.update(caller.owner, request, arrivals)
        self._catalog.expect(self._queues.waiting())
        return pb.ExpectResponse(again=not complete)

    @_call
    async def ReportSteps(self, request: pb.StepReport, caller: Session) -> pb.StepAnswer:  # noqa: N802
        """Update the steps of an engine."""
        self._validate.steps(request)
        return self._budget.report(caller.owner, request)

    async def Statistics(self, request: pb.StatisticsRequest, context: _Context) -> pb.StatisticsResponse:  # noqa: N802
        """Return counters and the state of the data plane."""
        metrics = self._metrics
        storage, connected = self._catalog.storage
        return pb.StatisticsResponse(
            version=__version__,
            backend=native.backends()[self._config.backend].label,
            registrations=len(self._registrations),
            buffer_bytes=self._buffers.total,
            resident_bytes=resident_bytes(),
            stages=[
                pb.StageStatistics(
                    stage=stage.name.lower(),
                    items=count.items,
                    input_bytes=count.input_bytes,
                    output_bytes=count.output_bytes,
                    busy_ns=count.busy_ns,
                )
                for stage, count in (metrics.pipeline.statistics() if metrics.pipeline else {}).items()
            ],
            fetch_outcomes=dict(metrics.fetches),
            store_outcomes=dict(metrics.stores),
            engines=self.engines.running(),
            storage=storage,
            storage_connected=connected,
            up_seconds=time.monotonic() - self._started_s,
            metrics=await asyncio.to_thread(generate_latest, metrics.registry),
            **{name: metrics.totals[name] for name in _STATISTICS},
        )

    async def Trace(  # noqa: N802
        self, request: pb.TraceRequest, context: _Context
    ) -> AsyncIterator[pb.TraceResponse]:
        """Record the threads' spans of the next fetches."""
        try:
            with self.hosts.call(context) as caller:
                timeout = self._validate.timeout(request.timeout_ms)
                fetches = self._validate.count("fetches", request.fetches)
                with self._tracer.recording(caller.owner, fetches, decides=caller.host.decides) as recording:
                    yield pb.TraceResponse()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(recording.done.wait(), timeout)
                parts = list(self._tracer.result(recording))
        except CallError as error:
            await context.abort(error.code, str(error), error.metadata)
        for part in parts:
            yield part

    @_call
    async def Decided(self, request: pb.Decision, caller: Session) -> pb.DecidedResponse:  # noqa: N802
        """Add a host's decision to a recording of its fetches."""
        self._validate.decision(request)
        caller.host.decides = True
        self._tracer.decided(caller.owner, request)
        return pb.DecidedResponse()

    # ---- Lookups, publications and pins

    @_call
    async def Lookup(self, request: pb.LookupRequest, caller: Session) -> pb.LookupResponse:  # noqa: N802
        """Find the stored chunks of each chain."""
        chains = self._validate.chains(request.chains)
        job = Job(caller.owner, "", self._validate.timeout(request.timeout_ms))
        lookup = self._look_up(chains, published=request.published, prefetch=request.prefetch)
        with self._metrics.lookup_seconds.time():
            answer, outcome, detail = await self._ending("Lookup", job.within(lookup, "asking storage for headers"))
        found, pending = answer or ([], None)
        self._metrics.lookups[outcome_name(self._log_unanswered(found) or outcome)] += 1
        response = pb.LookupResponse(
            present=[pack(each.present) for each in found],
            published=[pack(each & ~chain.present) for each, chain in zip(pending or (), found, strict=bool(pending))],
            tiers=[each.tiers.tobytes() for each in found],
            stored_bytes=[each.stored_bytes for each in found],
            cold_ms=[min(each.cold_ms, _UINT32_MAX) for each in found],
            outcome=outcome,
            detail=detail,
        )
        return self._logged(response)

    def _log_unanswered(self, found: Sequence[ChainLookup]) -> pb.Outcome | None:
        """Log that storage has not answered for some keys of a lookup, and return their outcome; None if it has."""
        keys = sum(each.unanswered_chunks for each in found)
        unanswered = next((each.unanswered for each in found if each.unanswered), None)
        if unanswered is None:
            return None
        outcome, detail = ending_of(unanswered.error(f"{keys} keys count as not stored"))
        self._log.log(logging.WARNING, f"Lookup: {outcome_name(outcome)}", "", f"Lookup: {detail}")
        return outcome

    async def _look_up(
        self, chains: Sequence[Chain], *, published: bool, prefetch: bool
    ) -> tuple[list[ChainLookup], list[Flags] | None]:
        """Look chains up, with their pending chunks if ``published``, in one round trip.

        The request for pending chunks goes first: a chunk that is stored in between would otherwise be neither pending
        nor stored. So does the prefetch of cold records, so that the answer includes its effect.
        """

        async def nothing() -> None:
            return None

        first = self._catalog.prefetch(chains) if prefetch else nothing()
        second = self._catalog.published(chains) if published else nothing()
        _, pending, found = await asyncio.gather(first, second, self._catalog.lookup(chains))
        return found, pending

    @_call
    async def Publish(self, request: pb.PublishRequest, caller: Session) -> pb.PublishResponse:  # noqa: N802
        """Publish chunks that will be stored soon."""
        keys = self._validate.keys("keys", list(request.keys))
        job = Job(caller.owner, "", self._validate.timeout(request.timeout_ms))
        plain = request.plain and self._page_loader is not None  # as for the store
        publishing = self._catalog.publish(caller.owner, keys, request.lasts_ms, plain=plain)
        step = job.within(publishing, "publishing chunks to storage")
        reach, outcome, detail = await self._ending("Publish", step)
        return self._logged(pb.PublishResponse(outcome=outcome, detail=detail, reach=reach or pb.REACH_ALL))

    @_call
    async def Pin(self, request: pb.PinRequest, caller: Session) -> pb.PinResponse:  # noqa: N802
        """Pin chunks for a session, or end its pins."""
        keys, session = self._validate.pins(request)
        job = Job(caller.owner, "", self._validate.timeout(request.timeout_ms))
        pinning = self._catalog.pin(caller.owner, session, keys, request.lasts_ms)
        supported, outcome, detail = await self._ending("Pin", job.within(pinning, "pinning chunks in storage"))
        return self._logged(pb.PinResponse(outcome=outcome, detail=detail, supported=bool(supported)))

    async def _ending(
        self, call: str, step: Coroutine[Any, Any, _Response]
    ) -> tuple[_Response | None, pb.Outcome, str]:
        """Run the step of a call; return its result, None if it failed, with outcome and detail."""
        try:
            return await step, pb.OUTCOME_COMPLETE, ""
        except CallError:
            raise
        except ENDINGS as error:
            return None, *ending_of(error)
        except Exception as error:
            return None, *self._internal(call, error)

    # ---- Registered memory

    @_call
    async def RegisterMemory(  # noqa: N802
        self, request: pb.RegisterMemoryRequest, caller: Session
    ) -> pb.RegisterMemoryResponse:
        """Register memory."""
        layouts = self._validate.layouts(request.layouts)
        for layout in layouts:
            self._check_buffers(layout)
        channels = self._validate.channels(request, layouts)
        registration = await self._registrations.register(request, layouts, channels, caller.owner, caller.token)
        if registration.paging is not None and (loader := self._page_loader) is not None:
            memory = registration.memory
            registration.closing.append(functools.partial(loader.unregister, memory))
            await asyncio.to_thread(loader.register, memory)
        self._log.log(
            logging.INFO,
            "registered",
            caller.owner,
            f"registered memory {registration.memory_id:016x}: {registration.size} bytes of "
            f"{request.WhichOneof('memory')}, {len(layouts)} layouts",
        )
        return pb.RegisterMemoryResponse(
            memory_id=registration.memory_id, chunk_bytes=[layout.raw_bytes for layout in layouts]
        )

    @_call
    async def ReleaseMemory(  # noqa: N802
        self, request: pb.ReleaseMemoryRequest, caller: Session
    ) -> pb.ReleaseMemoryResponse:
        """Remove registered memory once no job uses it."""
        await self._registrations.release(request.memory_id, caller.token)
        return pb.ReleaseMemoryResponse()

    def _registration(self, caller: Session, memory_id: int) -> Registration:
        registration = self._registrations.get(memory_id, caller.token)
        if registration is None:
            text = f"memory {memory_id:016x} is not registered (any more): register it again"
            raise Stop(pb.OUTCOME_UNKNOWN_MEMORY, text)
        return registration

    def _check_reachable(self, registration: Registration, outcome: pb.Outcome) -> None:
        """Remove a registration that the accelerator could not access; its owner registers it again."""
        if outcome == pb.OUTCOME_DEVICE and not self._registrations.given_up:
            text = f"registered memory {registration.memory_id:016x} could not be accessed: removed"
            self._log.log(logging.WARNING, "unreachable", registration.owner, text)
            registration.released = True

    # ---- Jobs

    @_call
    async def Fetch(self, request: pb.FetchRequest, caller: Session) -> pb.FetchResponse:  # noqa: N802
        """Fetch chunks into registered memory."""
        return await self._fetch(request, caller)

    async def FetchLayers(  # noqa: N802
        self, request: pb.FetchRequest, context: _Context
    ) -> AsyncIterator[pb.FetchLayersResponse]:
        """Fetch chunks in the order of layers, and report leading layers meanwhile."""
        progress: asyncio.Queue[int | None] = asyncio.Queue()  # at most one entry for each layer, and the end
        fetch = functools.partial(self._fetch, on_layers=progress.put_nowait)
        fetching = asyncio.ensure_future(self.answer(context, fetch, request))
        fetching.add_done_callback(lambda _: progress.put_nowait(None))
        try:
            while (layers := await progress.get()) is not None:
                yield pb.FetchLayersResponse(layers=layers)
            yield pb.FetchLayersResponse(answer=await fetching)
        finally:
            fetching.cancel()
            await asyncio.wait({fetching})

    async def _fetch(
        self, request: pb.FetchRequest, caller: Session, on_layers: Callable[[int], None] | None = None
    ) -> pb.FetchResponse:
        async def work(job: Job) -> pb.FetchResponse:
            memory = functools.partial(self._registration, caller)
            parts = self._validate.fetch(request, memory, streamed=on_layers is not None)
            fetch = Fetch(
                parts,
                layerwise=request.order == pb.ORDER_LAYERS,
                on_layers=on_layers,
                window_s=request.window_us / 1e6,
                mover=_FETCHERS[request.purpose],
            )
            regions = [(part.registration, part.offset, part.length) for part in parts]
            if request.HasField("progress"):
                regions.append((parts[0].registration, request.progress, PROGRESS_BYTES))
                fetch.word = parts[0].registration.region(request.progress, PROGRESS_BYTES)
            with contextlib.ExitStack() as claims:
                for region in regions:
                    claims.enter_context(self._registrations.claim(*region, writing=True))
                response = await self._fetcher.fetch(job, fetch)
            for part in parts:
                self._check_reachable(part.registration, response.outcome)
            return response

        return await self._run_job(caller, request, work, self._fetch_counts)

    @_call
    async def FetchPages(self, request: pb.FetchPagesRequest, caller: Session) -> pb.FetchResponse:  # noqa: N802
        """Load chunks of pages from devices of this machine into paged memory."""

        async def work(job: Job) -> pb.FetchResponse:
            registration = self._registration(caller, request.memory_id)
            keys, blocks = self._validate.pages(request, registration)
            (layout,), paging = registration.layouts, registration.paging
            assert paging is not None
            word = registration.address + request.progress if request.HasField("progress") else 0
            pages = PageRequest(keys, layout, registration.address, paging.first, paging.stride, blocks, word)
            with self._registrations.claim(registration, 0, registration.size, writing=True):
                return await self._load_pages(job, pages)

        return await self._run_job(caller, request, work, self._fetch_counts)

    async def _load_pages(self, job: Job, request: PageRequest) -> pb.FetchResponse:
        if self._page_loader is None:
            return pb.FetchResponse(outcome=pb.OUTCOME_ABSENT, detail="this data plane has no devices")
        try:
            delivered, corrupt, stop = await self._page_loader.load(job, request)
        except ENDINGS as error:  # before a read was begun
            outcome, detail = ending_of(error)
            return pb.FetchResponse(outcome=outcome, detail=detail)
        if stop is not None:
            outcome, detail = stop.outcome, str(stop)
        elif delivered.all():
            outcome, detail = pb.OUTCOME_COMPLETE, ""
        elif corrupt:
            outcome, detail = pb.OUTCOME_CORRUPT, f"chunk {request.keys[corrupt[0]].hex()}: pages differ from checksums"
        else:
            outcome, detail = pb.OUTCOME_ABSENT, "devices do not hold all chunks as pages"
        size = int(delivered.sum()) * request.layout.raw_bytes // request.layout.layers
        self._metrics.totals["fetched_bytes"] += size
        self._metrics.totals["delivered_bytes"] += size
        return pb.FetchResponse(
            delivered=[pack(delivered)], outcome=outcome, detail=detail, fetched_bytes=size, delivered_bytes=size
        )

    @_call
    async def Store(self, request: pb.StoreRequest, caller: Session) -> pb.StoreResponse:  # noqa: N802
        """Store chunks from registered memory as records."""

        async def work(job: Job) -> pb.StoreResponse:
            keys = self._validate.keys("keys", list(request.keys))
            parents = self._validate.parents(list(request.parents), len(keys))
            self._validate.purpose(request.purpose)
            registration = self._registration(caller, request.memory_id)
            layout = self._validate.layout_of(registration, request.layout)
            offset = self._validate.offset(layout, request.offset)
            plain = request.plain and self._page_loader is not None  # uncompressed bytes would only load the link
            mover = _STORERS[request.purpose]
            positions = self._validate.positions(request.positions, layout, len(keys))
            keep, lasts_ms = self._validate.keep(request.keep), request.lasts_ms
            store = Store(
                registration, layout, offset, keys, parents, positions, lasts_ms, plain=plain, keep=keep, mover=mover
            )
            size = len(keys) * layout.raw_bytes
            with self._registrations.claim(registration, offset, size, writing=False):
                response = await self._storer.store(job, store)
            self._check_reachable(registration, response.outcome)
            return response

        return await self._run_job(caller, request, work, self._store_counts)

    @_call
    async def Cancel(self, request: pb.CancelRequest, caller: Session) -> pb.CancelResponse:  # noqa: N802
        """Cancel a job."""
        return pb.CancelResponse(found=self.jobs.cancel(caller.token, request.job_id))

    async def _run_job(
        self,
        caller: Session,
        request: Any,
        work: Callable[[Job], Coroutine[Any, Any, _Answer]],
        counts: _CallCounts[_Answer],
    ) -> _Answer:
        """Run a job to its end. If the caller disconnects, the job is cancelled, and its end awaited."""

        async def answer(job: Job) -> _Answer:
            response, outcome, detail = await self._ending(counts.call, work(job))
            if response is None:
                response = counts.response(outcome=outcome, detail=detail)
            counts.outcomes[outcome_name(response.outcome)] += 1
            return response

        job_id = self._validate.job_id(request.job_id)
        timeout = self._validate.timeout(request.timeout_ms)
        begin = time.monotonic()
        with self.jobs.enter(caller.token, caller.owner, job_id, timeout) as job:
            task = asyncio.create_task(answer(job))
            try:
                response = await asyncio.shield(task)
            except asyncio.CancelledError:
                job.cancel()
                await asyncio.wait({task})
                task.exception()  # else asyncio logs it
                raise
        counts.seconds.observe(time.monotonic() - begin)
        return self._logged(response)

    def _logged(self, response: _Answer) -> _Answer:
        """Log a failed call whose reason nothing else logs; return its answer."""
        if response.outcome in _LOGGED:
            call, outcome = type(response).__name__.removesuffix("Response"), outcome_name(response.outcome)
            text = f"{call} ended with {outcome}: {response.detail}"
            self._log.log(logging.WARNING, f"{call}: {outcome}", "", text)
        return response

    def _internal(self, call: str, error: Exception) -> tuple[pb.Outcome, str]:
        detail = f"a bug in {call}: {type(error).__name__}: {error}"
        if self._log.log(logging.ERROR, f"{call}: {type(error).__name__}", "", f"{detail}; please report it"):
            logger.exception("traceback")
        return pb.OUTCOME_INTERNAL, detail

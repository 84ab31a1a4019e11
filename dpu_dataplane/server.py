"""The daemon: construction, start and stop of all parts."""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dpu_dataplane.admission import CALLS_MAX, Admission
from dpu_dataplane.batches import Buffers
from dpu_dataplane.catalog import Catalog
from dpu_dataplane.config import DataPlaneConfig, codec_name
from dpu_dataplane.fetching import Fetcher, LayerProgress
from dpu_dataplane.hosts import HostTable
from dpu_dataplane.interference import InterferenceBudget
from dpu_dataplane.jobs import JobQueue
from dpu_dataplane.log_limiter import LogLimiter
from dpu_dataplane.metrics import Metrics, resident_bytes
from dpu_dataplane.queries import Queries
from dpu_dataplane.registrations import Registrations
from dpu_dataplane.service import DataPlaneService
from dpu_dataplane.sources.selection import nodes_max, source_of
from dpu_dataplane.sources.source import Resources, Source
from dpu_dataplane.storing import Storer
from dpu_dataplane.tracing import Tracer
from shadowserve import native, spans
from shadowserve.addresses import join_address, split_address
from shadowserve.cores import confine
from shadowserve.errors import ConfigurationError, NativeError
from shadowserve.health import Check, Endpoint, Posts, answers, check
from shadowserve.logs import configure_logging
from shadowserve.memory_limit import check_memory
from shadowserve.proto import dataplane_pb2, dataplane_pb2_grpc
from shadowserve.signals import stop_signals
from shadowserve.tls import Renewed, read_authorities, read_key_pair

SERVICE_NAME: Final = dataplane_pb2.DESCRIPTOR.services_by_name["DataPlane"].full_name
MESSAGE_BYTES_MAX: Final = 8 << 20
"""Most bytes of a gRPC message: 65,536 keys take 2.2 MB; gRPC's own default is 4 MiB."""
KEEPALIVE_MS: Final = 10_000
STREAMS_MAX: Final = 512
"""Most calls in progress on a connection: several times all queues of a host; further calls wait at the caller."""
HANDSHAKE_MS: Final = 20_000
"""Time limit of a handshake; it takes milliseconds, and two more round trips with TLS."""
_TICK: Final = 0.1
_GRACE_S: Final = 86400.0  # grace period of the gRPC server; a later call stops it earlier
_STORE_QUEUE: Final = 64  # most waiting stores; further ones are refused
_QUEUE_DEPTH: Final = 64  # slices in each queue between two stages
_REQUESTS_IN_FLIGHT: Final = 8  # range requests sent ahead on each data connection
_POLL_INTERVAL_US: Final = 10  # pause between two polls of an idle accelerator

logger = logging.getLogger(__name__)


class Daemon:
    """The data plane, within one event loop: ``async with Daemon(config) as daemon``."""

    device_lost: asyncio.Event  # set once the accelerator was given up: the process has to end

    def __init__(self, config: DataPlaneConfig) -> None:
        self.config = config
        self.address = ""  # address of the gRPC server, ``host:port`` or ``unix:/path``
        self.metrics = Metrics()
        self.metrics_port: int | None = None  # port of /metrics and the probes; None for none
        self._loop: asyncio.AbstractEventLoop
        self._source: Source
        self._draining = False
        self._pipeline: native.Pipeline
        self.unclean = (
            False  # after the stop, jobs or the accelerator may access memory: the process has to end at once
        )
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for jobs for half of ``shutdown_timeout_s``, cancel the rest, and stop all parts."""
        self.unclean |= self._pipeline.given_up
        await self._exit.aclose()

    async def _start(self) -> None:
        config = self.config
        self._loop = asyncio.get_running_loop()
        codec = _codec(config)
        buffers = _buffers(config)
        check_memory(config.memory_budgets())
        self._pipeline = pipeline = await asyncio.to_thread(_make_pipeline, config, buffers)
        self._exit.callback(pipeline.close)
        self.metrics.pipeline = pipeline
        fetching, encoding, storing = (ThreadPoolExecutor(1, name) for name in ("fetch", "encode", "store"))
        self.budget = InterferenceBudget(self.metrics, pipeline.unlimit, shares_memory=config.memory_shared)
        self._exit.callback(self.budget.close)
        resources = Resources(
            pipeline=pipeline, fetching=fetching, storing=storing, metrics=self.metrics, budget=self.budget
        )
        self._source = source = source_of(config, resources)
        await source.start()
        self._exit.push_async_callback(source.close)
        catalog = Catalog(source, self.metrics, config)
        self._exit.push_async_callback(catalog.close)
        registrations = Registrations(config, pipeline)
        self._exit.callback(registrations.close)
        self.device_lost = registrations.device_lost
        for executor in (fetching, encoding, storing):
            self._exit.callback(executor.shutdown)
        tracer = Tracer(pipeline)
        fetches, stores = (JobQueue(size, config.hosts_max) for size in (config.fetch_queue, _STORE_QUEUE))
        progress = LayerProgress(pipeline)
        self._exit.callback(progress.close)
        fetcher = Fetcher(resources, catalog, source, buffers, fetches, tracer, progress)
        slice_bytes, batch_chunks = int(config.slice_bytes), len(config.stage_cores()["store"])
        storer = Storer(resources, encoding, catalog, source, buffers, stores, codec, slice_bytes, batch_chunks)
        hosts = HostTable(config, registrations, catalog.forget_host)
        self._log = LogLimiter()
        service = DataPlaneService(config, fetcher, storer, registrations, hosts, self._log)
        self._add_gauges(fetcher, storer, registrations, hosts)
        self._exit.push_async_callback(_stop_task, asyncio.create_task(_expire(hosts, self._log, config)))
        if config.metrics_port is not None:
            token = config.query_token.get_secret_value()
            queries = Queries(self._loop, service.engines, catalog, self.metrics)
            posts = Posts(token, queries.paths, queries.answer) if token else None
            self._serve_metrics(config.metrics_host, config.metrics_port, posts)
        await self._serve(service)

    def _add_gauges(self, fetcher: Fetcher, storer: Storer, registrations: Registrations, hosts: HostTable) -> None:
        emulated, started_s = float(native.backends()[self.config.backend].emulated), time.monotonic()
        self.metrics.gauges |= {
            "hosts": ("Connected hosts", lambda: len(hosts)),
            "storage_up": ("1 if storage is connected", lambda: float(fetcher.source.connected)),
            "quarantined_keys": ("Keys in quarantine because of a faulty record", lambda: fetcher.catalog.quarantined),
            "fetch_queue_jobs": ("Waiting fetches", lambda: fetcher.queue.waiting),
            "store_queue_jobs": ("Waiting stores", lambda: storer.queue.waiting),
            "registrations": ("Regions of registered memory", lambda: len(registrations)),
            "registered_bytes": ("Bytes of registered memory", lambda: registrations.total_bytes),
            "backend_emulated": ("1 if the backend is an emulator of a DPU", lambda: emulated),
            "buffer_bytes": ("Bytes of the pipeline's buffers", lambda: fetcher.buffers.total),
            "pipeline_locked_bytes": ("Buffer bytes that are locked in memory", lambda: self._pipeline.locked_bytes),
            "resident_bytes": ("Resident memory of the daemon, without clients' segments", resident_bytes),
            "up_seconds": ("Time since the start", lambda: time.monotonic() - started_s),
        }

    def _serve_metrics(self, host: str, port: int, posts: Posts | None) -> None:
        try:
            endpoint = Endpoint(
                host, port, self.metrics.registry, health=self.health, ready=self.readiness, posts=posts
            )
        except OSError as error:
            where = join_address(host, port)
            raise ConfigurationError(f"metrics_host, metrics_port: cannot listen on {where}: {error}") from error
        self._exit.callback(endpoint.close)
        self.metrics_port = endpoint.port
        logger.info("metrics and probes: http://%s/metrics", join_address(host, endpoint.port))

    @property
    def storage_name(self) -> str:
        return self._source.name

    def health(self) -> list[Check]:
        """Check that the event loop answers and the accelerator works; from any thread but the event loop's."""
        sound = not self._pipeline.given_up
        return [
            answers("event loop", self._loop.call_soon_threadsafe),
            check("accelerator", sound, self._pipeline.backend, "given up: it hangs"),
        ]

    def readiness(self) -> list[Check]:
        """Check whether calls are accepted. Without storage they are, but every call is a miss: a warning."""
        where = self._source.name
        connected = self._source.connected
        return [
            *self.health(),
            check("listening", bool(self.address), f"on {self.address}", "not yet"),
            check("draining", not self._draining, "no", "yes: it is stopping"),
            check("storage", connected, f"connected to {where}", f"not connected to {where}", fatal=False),
        ]

    async def _serve(self, service: DataPlaneService) -> None:
        config = self.config
        admission = Admission(int(config.call_bytes_max), config.hosts_max, service.hosts.owner_of, self._log)
        self.metrics.gauges["call_bytes"] = "Message bytes of calls in progress", lambda: admission.total_bytes
        server = grpc.aio.server(
            interceptors=[admission],
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),  # a second daemon on the same port is an error
                # Hosts ping in this interval; by default gRPC treats that as abuse.
                ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.max_concurrent_streams", STREAMS_MAX),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                # A host without a call for so long is removed; its connection is not needed any more.
                ("grpc.max_connection_idle_ms", int(1000 * self.config.registration_idle_s)),
            ],
            maximum_concurrent_rpcs=2 * CALLS_MAX,  # Admission enforces the limits; this is the last resort
        )
        dataplane_pb2_grpc.add_DataPlaneServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        health_service: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # its stubs lack it
        health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
        credentials = _credentials(self.config, self.metrics)
        try:
            if credentials is None:
                port = server.add_insecure_port(self.config.listen)
            else:
                port = server.add_secure_port(self.config.listen, credentials)
        except RuntimeError as error:
            raise ConfigurationError(
                f"listen: cannot listen on {self.config.listen}; is another data plane running there?"
            ) from error
        if self.config.listen.startswith("unix:"):
            self.address = self.config.listen
        else:
            host, _ = split_address(self.config.listen)
            self.address = join_address(host, port)
        await server.start()
        for name in ("", SERVICE_NAME):
            await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._exit.push_async_callback(_stop_task, asyncio.create_task(self._watch_device(health_service)))
        self._exit.push_async_callback(self._stop_serving, server, service, health_service)

    async def _watch_device(self, health_service: Any) -> None:
        await self.device_lost.wait()
        logger.critical(
            "%s hangs for %g s: it is given up, and this data plane ends, because the device may still write memory; "
            "start it again, and if that does not help, see 'shadowserve doctor'",
            self._pipeline.device or "the accelerator",
            self.config.device_timeout_s,
        )
        for name in ("", SERVICE_NAME):
            await health_service.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _stop_serving(self, server: grpc.aio.Server, service: DataPlaneService, health_service: Any) -> None:
        """Refuse new calls; wait for jobs for half the time, then cancel them and wait for a quarter of it.

        The last quarter is for jobs without a caller. If they do not end, the parts that they may use are not stopped.
        """
        self._draining = True
        await health_service.enter_graceful_shutdown()
        half = self.config.shutdown_timeout_s / 2
        stopping = asyncio.ensure_future(server.stop(_GRACE_S))
        await asyncio.wait({stopping}, timeout=half)
        if len(service.jobs):
            logger.info("cancelling %d jobs that did not finish within %g s", len(service.jobs), half)
            service.jobs.cancel_all()
        # The time starts here: if the machine was suspended meanwhile, the jobs still get it.
        await asyncio.wait({stopping}, timeout=half / 2)
        await server.stop(None)
        await stopping
        end = time.monotonic() + half / 2
        while len(service.jobs) and time.monotonic() < end:  # their callers have left, but their memory is still in use
            await asyncio.sleep(0.01)
        if len(service.jobs):
            logger.error("%d jobs do not end: the process ends without closing what they use", len(service.jobs))
            self.unclean = True
            self._left = self._exit.pop_all()  # so that no further part is stopped


def _codec(config: DataPlaneConfig) -> native.Codec:
    if config.backend not in native.backends():
        raise ConfigurationError(f"backend: this build has no {config.backend}; see 'shadowserve doctor'")
    name = codec_name(config.codec, config.backend)
    codec = native.Codec[name.upper()]
    if codec not in native.codec_implementations():
        raise ConfigurationError(f"codec: this build cannot encode {name}; see 'shadowserve doctor'")
    return codec


def _buffers(config: DataPlaneConfig) -> Buffers:
    return Buffers(
        decompression=int(config.decompression_buffer_bytes),
        dequantization=None if config.stages_fused else int(config.dequantization_buffer_bytes),
        dma_source=None if config.stages_fused else int(config.dma_source_buffer_bytes),
        store=int(config.store_buffer_bytes),
    )


def _make_pipeline(config: DataPlaneConfig, buffers: Buffers) -> native.Pipeline:
    cores = config.stage_cores()
    try:
        pipeline = native.Pipeline(
            backend=config.backend,
            device=config.device,
            poll_interval_us=_POLL_INTERVAL_US,
            fused=config.stages_fused,
            queue_depth=_QUEUE_DEPTH,
            requests_in_flight=_REQUESTS_IN_FLIGHT,
            decompression_bytes=buffers.decompression,
            dequantization_bytes=buffers.dequantization or 0,
            dma_source_bytes=buffers.dma_source or 0,
            store_bytes=buffers.store,
            net_cores=cores["net"],
            decompress_cores=cores["decompress"],
            dequantize_cores=[] if config.stages_fused else cores["dequantize"],
            dma_cores=[] if config.stages_fused else cores["dma"],
            store_cores=cores["store"],
            trace_events=config.trace_events,
            nodes_max=nodes_max(config),
            device_timeout_ms=max(1, int(1000 * config.device_timeout_s)),
        )
    except NativeError as error:
        raise ConfigurationError(f"the pipeline cannot be created: {error}") from error
    backend = native.backends()[config.backend]
    device = f" on {pipeline.device}" if pipeline.device else ""
    level = logging.WARNING if backend.emulated else logging.INFO
    logger.log(level, "backend %s: %s%s", backend.label, backend.description, device)
    if pipeline.locked_bytes < buffers.total:
        logger.info(
            "%d of %d bytes of buffers are locked in memory; raise the limit (ulimit -l) to lock all",
            pipeline.locked_bytes,
            buffers.total,
        )
    return pipeline


async def _expire(hosts: HostTable, log: LogLimiter, config: DataPlaneConfig) -> None:
    while True:
        await asyncio.sleep(min(config.registration_idle_s / 4, 60.0))
        hosts.expire(time.monotonic())
        log.flush(time.monotonic())


async def _stop_task(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


class _Certificates:
    def __init__(self, config: DataPlaneConfig) -> None:
        self._config = config
        self.expires = 0.0
        self._files = Renewed((config.tls_cert, config.tls_key, config.tls_client_ca), self._read, _unusable)
        self.first = self._returned = self._files.current()

    def _read(self) -> grpc.ServerCertificateConfiguration:
        config = self._config
        pair = read_key_pair(config.tls_cert, config.tls_key)
        authorities = read_authorities("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None
        self.expires = pair.expires.timestamp()
        logger.info("certificate %s is valid until %s UTC", config.tls_cert, f"{pair.expires:%Y-%m-%d %H:%M}")
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], authorities)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the files if they have changed since the last call, else None. gRPC calls it at each handshake."""
        current = self._files.current()
        if current is self._returned:
            return None
        self._returned = current
        return current


def _unusable(error: ConfigurationError) -> None:
    logger.error("the certificates have changed and cannot be used; the old ones stay in use: %s", error)


def _credentials(config: DataPlaneConfig, metrics: Metrics) -> grpc.ServerCredentials | None:
    if not config.tls_cert:
        return None
    files = _Certificates(config)
    metrics.gauges["tls_certificate_expiry_timestamp_seconds"] = (
        "Expiry of the certificate in use, in seconds since 1970",
        lambda: files.expires,
    )
    return grpc.dynamic_ssl_server_credentials(
        files.first,
        files.changed,  # type: ignore[arg-type]  # None, for no change, is missing in the stubs
        require_client_authentication=bool(config.tls_client_ca),
    )


async def _main(config: DataPlaneConfig) -> None:
    stop = asyncio.Event()
    stopped = threading.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Daemon(config) as daemon:
        print(f"ready {daemon.address}", flush=True)
        backend = native.backends()[config.backend].label
        logger.info("ready on %s (storage %s, backend %s)", daemon.address, daemon.storage_name, backend)
        ends = [asyncio.ensure_future(event.wait()) for event in (stop, daemon.device_lost)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        logger.info("stopping")
        threading.Thread(target=_last_resort, args=(2 * config.shutdown_timeout_s, stopped), daemon=True).start()
    stopped.set()
    logger.info("stopped")
    if daemon.unclean:
        _end_now()


def _last_resort(seconds: float, stopped: threading.Event) -> None:
    """End the process if the stop hangs, such as in a driver's call that never returns."""
    for _ in range(int(seconds / _TICK)):  # ticks, not a clock: a suspended machine does not count
        if stopped.wait(_TICK):
            return
    logger.critical("the stop hangs: ending the process without closing its parts")
    _end_now()


def _end_now() -> None:
    """End the process without unmapping memory first: its end stops all writes to the memory."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(1)


def run(config: DataPlaneConfig) -> None:
    """Run the daemon until SIGTERM or SIGINT; ConfigurationError if the configuration cannot be used.

    Prints ``ready ADDRESS`` on standard output once calls are answered; logs go to standard error. If something may
    still write to memory after the stop, the process ends at once, with status 1.
    """
    # First: threads inherit their cores, and buffers are allocated on the memory node of these cores.
    confine(config.process_cores())
    configure_logging(config.log_level, config.log_format)
    spans.start(config.otlp_endpoint, "shadowserve-dpu")
    asyncio.run(_main(config))

"""The storage server: listens, accepts, does periodic work, and stops. ``shadowserve storage`` calls :func:`run`.

The main thread accepts clients and keeps time. ``io_threads`` threads serve clients; others verify large records, drive
the store, send layers and answer HTTP.
"""

import asyncio
import contextlib
import errno
import gc
import itertools
import logging
import math
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Final

from shadowserve import spans
from shadowserve.addresses import is_loopback, join_address
from shadowserve.clock import wall_clock_ms
from shadowserve.cores import chosen_cores, confine
from shadowserve.errors import ConfigurationError
from shadowserve.logs import configure_logging
from shadowserve.memory_limit import check_memory
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.tier import ColdTier
from shadowserve.pool.device_pool import DevicePool
from shadowserve.pool.memory_pool import MemoryPool
from shadowserve.pool.pool import Pool
from shadowserve.pool.thread import PoolThread
from shadowserve.pool.types import ENTRIES_PER_HOLD
from shadowserve.resp import encode_error
from shadowserve.signals import stop_signals
from storage_kv.access.audit import AuditLog
from storage_kv.access.users import Users
from storage_kv.clients.connection import Connection
from storage_kv.clients.io_threads import IoThread, threads_for
from storage_kv.clients.transport import Certificates, PlainTransport, TlsTransport, Transport, limit_unsent
from storage_kv.clients.workers import Workers
from storage_kv.commands import BY_FULL_NAME
from storage_kv.config import StorageConfig
from storage_kv.fleet import Fleet
from storage_kv.layers import LayerStreams
from storage_kv.node import Node
from storage_kv.operations import Operations
from storage_kv.reconfiguration import Reconfiguration
from storage_kv.session import ClientInfo, Session

_log = logging.getLogger(__name__)

_BACKLOG: Final = 511  # as Redis; Linux rounds to a power of two
_ACCEPTS_PER_TURN: Final = 64
_WATCH_INTERVAL_S: Final = 0.1  # expiry, ten times a second as Redis, and stalled clients
_BREATH_S: Final = 0.001  # between two steps of long work, so that other threads get the lock
_REFUSED_LINGER_S: Final = 0.5
_REFUSED_LINGERING_MAX: Final = 128
_KEEPALIVE_S: Final = 300  # as Redis: detects clients whose machine has failed
_DESCRIPTORS_RESERVED: Final = 320  # for devices, HTTP and files
_LEAVING_MAX: Final = 64  # evicted connections that may still be open

_LOOPBACK_SEND_BYTES: Final = 512 << 10
"""Kernel send buffer for clients of the same machine. By default it grows to 4 MiB and leaves the CPU's caches between
the two copies: GET of 32 MiB then has half the speed and takes a third more CPU time. For other machines the kernel
chooses, because the buffer must cover the round trip."""

_DENIED: Final = (
    "DENIED this server is in protected mode: it has no password and accepts only clients of its own machine. To use "
    "it from other machines, set SHADOWSERVE_STORAGE_PASSWORD on the server and send AUTH; or, on a fully trusted "
    "network, set protected_mode to false."
)


def _tier_below(config: StorageConfig, s3: S3Config, fleet: Fleet) -> ColdTier:
    below = ColdTier(s3, serves=fleet.serves if config.fleet else None)
    for name, limits in config.tenants.items():
        below.set_quota(name, limits.bytes_max, limits.keys_max)  # before the first listing
    return below


class StorageServer:
    """A server in a running event loop.

    Call ``await start()``, then ``await wait_stopped()``; ``request_stop()`` from a signal handler ends the latter.
    """

    def __init__(
        self, config: StorageConfig, store: Pool | None = None, load: Callable[[], StorageConfig] | None = None
    ) -> None:
        """Create a server that does not listen yet. ``load`` reads the configuration again."""
        audit = AuditLog(config.audit_log, config.audit_log_bytes_max)
        users = Users(config, BY_FULL_NAME)
        fleet = Fleet(config.fleet)
        if store is None:
            below = None if config.s3 is None else _tier_below(config, config.s3, fleet)
            store = (DevicePool if config.devices else MemoryPool)(config, lower_tier=below)
        self.node = Node(Reconfiguration(config, load), users, store, wall_clock_ms, audit=audit, fleet=fleet)
        self.operations = Operations(self.node)
        self.node.reconfiguration.follow("connections_max", self._follow_connections_max)
        self.workers = Workers(config.verify_threads)
        self.addresses: list[tuple[str, int]] = []
        self._io_threads: list[IoThread] = []
        self._connections_max = config.connections_max
        self._certificates: Certificates | None = None
        self._listeners: list[socket.socket] = []
        self._refused: set[socket.socket] = set()
        self._session_ids = itertools.count(1)
        self._stop_requested = asyncio.Event()
        self._ended = asyncio.Event()
        self._cut_short = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._store_thread: PoolThread | None = None
        self._streams: LayerStreams | None = None

    @property
    def _lets_anyone_in(self) -> bool:
        return self.node.users.anyone_enters and not self.node.config.tls_client_ca

    def _follow_connections_max(self, old: StorageConfig, new: StorageConfig) -> None:
        self._connections_max = _raise_descriptor_limit(new.connections_max)

    async def start(self) -> None:
        config = self.node.config
        self._loop = asyncio.get_running_loop()
        self.operations.loops["main loop"] = self._loop.call_soon_threadsafe
        await self._loop.run_in_executor(None, self.operations.start)
        try:
            await self._start_serving(config)
        except BaseException:
            await self.stop()
            raise

    async def _start_serving(self, config: StorageConfig) -> None:
        if config.tls_cert:
            self._certificates = Certificates(config)
            self.node.server.certificate_expires_s = self._certificates.expires_s
        self._connections_max = _raise_descriptor_limit(config.connections_max)
        try:
            self._listeners = await self._listen(config.host, config.port)
        except OSError as error:
            advice = "choose another host or port"
            if error.errno == errno.EADDRINUSE:
                advice = "stop what listens there (ss -ltnp), perhaps another server, or choose another port"
            raise ConfigurationError(f"cannot listen on {config.host} port {config.port}: {error}; {advice}") from error
        self.node.server.port = self.addresses[0][1]
        await self.node.fleet.start()
        # In another thread: recovery of devices may take seconds. No client is accepted meanwhile.
        await self._loop.run_in_executor(None, self.operations.recover)
        self.node.apply_quotas()
        self._store_thread = PoolThread(self.node.store)
        streams = LayerStreams(self.node)
        streams.start()
        self._streams = self.node.streams = streams
        self.operations.loops["store thread"] = self._store_thread.hand
        self._start_io_threads(threads_for(config.io_threads))
        for listener in self._listeners:
            self._loop.add_reader(listener, self._on_acceptable, listener)
        self._watcher = asyncio.create_task(self._watch())
        self.operations.serving(",".join(itertools.starmap(join_address, self.addresses)))
        if config.listens_beyond_loopback:
            self._warn()

    def _warn(self) -> None:
        """Warn if other machines can reach the server without a password or TLS."""
        config = self.node.config
        if self._lets_anyone_in:
            effect = "refused" if config.protected_mode else "accepted without a password"
            _log.warning("no_password host=%s clients_of_other_machines=%r", config.host, effect)
        if not config.tls_cert:
            _log.warning(
                "no_tls host=%s hint='passwords and values cross the network in the clear: set tls_cert and tls_key'",
                config.host,
            )

    def _start_io_threads(self, count: int) -> None:
        try:
            for number in range(count):
                self._io_threads.append(IoThread(number, self.node, self.workers, self._on_client_closed))
                self.operations.loops[f"io thread {number}"] = self._io_threads[-1].call_soon
        except OSError as error:
            raise ConfigurationError(f"cannot start {count} threads: {error}; choose fewer io_threads") from error

    async def _listen(self, host: str, port: int) -> list[socket.socket]:
        """Bind every address of ``host``; with port 0 all use the port of the first."""
        found = await self._loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listeners: list[socket.socket] = []
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                if port == 0 and self.addresses:
                    address = (address[0], self.addresses[0][1], *address[2:])
                listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
                listeners.append(listener)
                listener.setblocking(False)
                self.addresses.append(listener.getsockname()[:2])
        except OSError:
            for listener in listeners:
                listener.close()
            self.addresses.clear()
            raise
        return listeners

    # ---- Accepting

    def _on_acceptable(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # No descriptors or memory. The listener stays readable, so pause, or the loop would spin.
                _log.error("accept_failed error=%r retry_s=1", str(error))
                self._loop.remove_reader(listener)
                self._loop.call_later(1.0, self._resume_accepting, listener)
                return
            self._admit(sock, address)

    def _resume_accepting(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._on_acceptable, listener)

    def _admit(self, sock: socket.socket, address: tuple[str, int]) -> None:
        node = self.node
        sock.setblocking(False)
        if node.config.protected_mode and self._lets_anyone_in and not is_loopback(address[0]):
            with node.lock:
                node.counters.connections_denied += 1
                node.warn_limited("client_denied", join_address(*address[:2]), "protected mode")
            self._refuse(sock, _DENIED)
            return
        with node.lock:
            has_slot = self._ensure_slot()
            node.counters.connections_rejected += not has_slot
            node.counters.connections += has_slot
        if not has_slot:
            self._refuse(sock, "ERR max number of clients reached")
            return
        try:
            _tune(sock, loopback=is_loopback(address[0]))
            if node.load.is_asked:
                limit_unsent(sock)
            local = sock.getsockname()
            transport = self._transport(sock)
        except OSError:  # the client has disconnected
            sock.close()
            return
        session = Session(
            next(self._session_ids),
            address=join_address(*address[:2]),
            info=ClientInfo(join_address(*local[:2]), transport.socket.fileno()),
        )
        with node.lock:
            node.sessions[session.id] = session
            node.begin(session)
            thread = min(self._io_threads, key=lambda thread: thread.clients)
            thread.clients += 1
        thread.serve(transport, session)

    def _ensure_slot(self) -> bool:
        """Return True if one more client may connect; may evict an unauthenticated one. Needs the node's lock."""
        node = self.node
        slots = node.slots
        if node.users.anyone_enters:
            if not node.slots.has_free(node.users.default.tenant):
                return False
        elif slots.unauthenticated >= node.config.unauthenticated_max:
            self._evict_unauthenticated()
        if len(node.sessions) < self._connections_max:
            return True
        # An evicted connection closes a moment later; their number is limited by the spare descriptors.
        taken = slots.unauthenticated + sum(slots.by_tenant.values())
        if taken >= self._connections_max and not self._evict_unauthenticated():
            return False
        return len(node.sessions) < self._connections_max + _LEAVING_MAX

    def _evict_unauthenticated(self) -> bool:
        """End the oldest unauthenticated client; return False if there is none."""
        session = self.node.slots.evict_oldest()
        if session is None:
            return False
        self.node.counters.unauthenticated_evicted += 1
        self.node.warn_limited(
            "unauthenticated_evicted", session.address, "new clients needed its slot, and it had not authenticated"
        )
        session.closing = True
        session.hooks.abort()
        return True

    def _transport(self, sock: socket.socket) -> Transport:
        if self._certificates is None:
            return PlainTransport(sock)
        context = self._certificates.context()
        self.node.server.certificate_expires_s = self._certificates.expires_s
        return TlsTransport(sock, context)

    def _refuse(self, sock: socket.socket, text: str) -> None:
        """Send an error and close a little later: at once, a reset might overtake the error."""
        try:
            sock.send(encode_error(text))
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            sock.close()
            return
        if len(self._refused) >= _REFUSED_LINGERING_MAX:
            sock.close()
            return
        self._refused.add(sock)
        self._loop.call_later(_REFUSED_LINGER_S, self._close_refused, sock)

    def _close_refused(self, sock: socket.socket) -> None:
        self._refused.discard(sock)
        sock.close()

    def _on_client_closed(self) -> None:
        self._loop.call_soon_threadsafe(self._end_if_empty)

    def _end_if_empty(self) -> None:
        if not self.node.sessions:
            self._ended.set()

    # ---- Time

    async def _watch(self) -> None:
        was_asked = False
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            if self.node.load.is_asked and not was_asked:  # for the first time
                was_asked = True
                for thread in self._io_threads:
                    thread.each(Connection.limit_unsent)
            while self._sweep() == ENTRIES_PER_HOLD:
                await asyncio.sleep(_BREATH_S)
            for thread in self._io_threads:
                thread.check_time()
            with self.node.lock:
                for budget in (self.node.memory, self.node.lent):
                    budget.close_slow_holder(self.node.config.stall_timeout_s, _WATCH_INTERVAL_S)
                self.node.load.measure(self.node.counters.sent_bytes, time.monotonic())
            self._log_repeated(time.monotonic())

    def _log_repeated(self, now_s: float) -> None:
        with self.node.lock:
            repeated = self.node.log_limiter.due(now_s)
            self.node.audit.write_repeats(now_s)
        for event, address, times, reason in repeated:
            _log.warning(event + "_again address=%s times=%d last_reason=%r", address, times, reason)

    def _sweep(self) -> int:
        with self.node.lock:
            return self.node.store.sweep(ENTRIES_PER_HOLD)

    # ---- Stopping

    def request_stop(self) -> None:
        """End wait_stopped(); a second call aborts all connections."""
        if self._stop_requested.is_set():
            self._cut_short.set()
            for thread in self._io_threads:
                thread.each(Connection.abort)
        self._stop_requested.set()

    async def wait_stopped(self) -> None:
        """Serve until request_stop() and for ``drain_delay_s`` more, while /readyz fails, then stop."""
        await self._stop_requested.wait()
        self.operations.drain()
        delay_s = self.node.config.drain_delay_s
        if delay_s:
            _log.info("draining delay_s=%g", delay_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._cut_short.wait(), delay_s)
        await self.stop()

    async def stop(self) -> None:
        """Stop accepting, finish replies within ``shutdown_timeout_s``, and close everything."""
        self._stop_requested.set()
        self.operations.drain()
        self._close_listeners()
        self._ended.clear()
        for thread in self._io_threads:
            thread.each(Connection.finish)
        if self.node.sessions:
            try:
                await asyncio.wait_for(self._ended.wait(), self.node.config.shutdown_timeout_s)
            except TimeoutError:
                _log.warning("replies_cut_off clients=%d", len(self.node.sessions))
        for thread in self._io_threads:
            thread.each(Connection.abort)
        for sock in list(self._refused):
            self._close_refused(sock)
        await self.node.fleet.stop()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._loop.run_in_executor(None, self.operations.close)
        self.workers.stop()
        threads, self._io_threads = self._io_threads, []  # a second signal finds no threads
        for thread in threads:
            thread.stop()
        self._log_repeated(math.inf)
        if self._streams is not None:
            await self._loop.run_in_executor(None, self._streams.stop)
        # No client is left. Acknowledged writes are durable already; this makes the next start quick.
        if self._store_thread is not None:
            drain_s = self.node.config.shutdown_timeout_s
            if not await self._loop.run_in_executor(None, self._store_thread.stop, drain_s):
                _log.error(
                    "store_left timeout_s=%g hint='a device does not answer: the process ends without it'", drain_s
                )
        await self._loop.run_in_executor(None, self.node.audit.close)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners = []


def _tune(sock: socket.socket, *, loopback: bool) -> None:
    if loopback:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_SEND_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _raise_descriptor_limit(connections: int) -> int:
    """Raise the limit of open files; return the number of connections that it allows."""
    wanted = connections + _DESCRIPTORS_RESERVED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    except (OSError, ValueError):
        granted = soft
    if granted < wanted:
        _log.warning("connections_limited to=%d wanted=%d hint='raise ulimit -n'", granted, wanted)
    return max(1, min(connections, granted - _DESCRIPTORS_RESERVED))


async def _serve(config: StorageConfig, load: Callable[[], StorageConfig] | None) -> None:
    server = StorageServer(config, load=load)
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, server.request_stop)
    loop.add_signal_handler(signal.SIGHUP, server.operations.reload)
    await server.start()
    # Programs that start this one wait for this line; with port 0 it is how they learn the port.
    print(f"ready {join_address(*server.addresses[0])}", flush=True)
    _log.info(
        "ready address=%s metrics_port=%s memory_budget_bytes=%d password=%s tls=%s",
        ",".join(itertools.starmap(join_address, server.addresses)),
        server.operations.metrics_port,
        config.memory_budget_bytes,
        "no" if server.node.users.anyone_enters else "yes",
        "mutual" if config.tls_client_ca else "yes" if config.tls_cert else "no",
    )
    await server.wait_stopped()
    _log.info("stopped commands=%d", server.node.counters.commands)


def run(config: StorageConfig, load: Callable[[], StorageConfig] | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Needs the main thread. ``load`` reads the configuration again, for SIGHUP.

    Prints ``ready HOST:PORT`` on standard output when clients can connect; logs go to standard error. Raises
    ConfigurationError if an address, a core or the memory is not available.
    """
    check_memory({"memory_budget_bytes": int(config.memory_budget_bytes)})
    confine(chosen_cores("cores", config.cores))
    configure_logging(config.log_level, config.log_format)
    spans.start(config.otlp_endpoint, "shadowserve-storage")
    # There may be millions of items, none in a reference cycle: collect rarely.
    gc.set_threshold(50_000, 20, 100)
    asyncio.run(_serve(config, load))

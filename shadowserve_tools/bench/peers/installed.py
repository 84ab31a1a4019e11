"""Peers that scripts/setup-peers installs: the installed ones, each as a contender with all its processes."""

import contextlib
import dataclasses
import functools
import importlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.peers import driver
from shadowserve_tools.bench.peers.contender import Contender, Field, family
from shadowserve_tools.bench.peers.network import LOOPBACK, Network
from shadowserve_tools.processes import Child, JsonProcess, free_port, started

DEFAULT_PYTHON: Final = Path(__file__).resolve().parents[3] / ".venv-peers" / "bin" / "python"
START_TIMEOUT_S: Final = 180.0
CALL_TIMEOUT_S: Final = 120.0
NOT_INSTALLED: Final = "not installed (scripts/setup-peers)"
ENVIRONMENT: Final = {
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "LMCACHE_TRACK_USAGE": "false",  # it would report to its makers
    "PYTHONPATH": "",  # ShadowServe's packages must not hide the peers'
}


Serde = Literal["", "fp8", "shadowserve"]
IDENTITY: Final = "synthetic weights"
"""Key ``identity`` of the serde ``shadowserve``."""


@dataclass(frozen=True)
class Bed:
    """Parameters of every peer.

    Attributes:
        values_file: One chunk; see :class:`~shadowserve_tools.bench.peers.driver.Values`.
    """

    python: Path
    logs: Path
    values_file: Path
    chunks: int
    network: Network = LOOPBACK


@dataclass(frozen=True, kw_only=True)
class L2:
    """Store behind LMCache's server: a running Redis, or a folder that is read past the page cache; by default none.

    Attributes:
        serde: How LMCache writes: raw; ``fp8``: half of the bytes, and values that differ by a few per cent;
            ``shadowserve``: this project's, which the server's process then imports.
        adapter: LMCache's client of ``redis``.
    """

    redis: Child | None = None
    folder: Path | None = None
    serde: Serde = ""
    adapter: Literal["resp", "valkey"] = "resp"

    def flag(self, *, workers: bool) -> dict[str, Any]:
        """Return LMCache's flag of this store; ``workers``: with a number of workers, as for any folder."""
        own: dict[str, Any]
        if self.folder is not None:
            own = {"type": "fs_native", "base_path": str(self.folder), "use_odirect": True}
        elif self.redis is None:
            return {}
        elif self.adapter == "valkey":
            own = {"type": "valkey", "startup_nodes": self.redis.address}
        else:
            host, _, port = self.redis.address.rpartition(":")
            own = {"type": "resp", "host": host, "port": int(port)}
        if workers or self.folder is not None:
            own["num_workers"] = 2
        if self.serde != "shadowserve":
            return own | ({"serde": {"type": self.serde}} if self.serde else {})
        plugin = {"type": "plugin", "module_path": "host_control.lmcache.serde", "class_name": "Adapter"}
        return plugin | {"adapter_params": own, "serde": {"type": self.serde, "identity": IDENTITY}}


NO_L2: Final = L2()


def installed(python: Path) -> dict[str, str]:
    """Return the versions of the peers in an environment, by name; empty if it does not exist."""
    if not python.exists():
        return {}
    command = [str(python), driver.__file__, "installed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2]
        raise ShadowServeError(f"the peers' environment is not complete ({reason}); run scripts/setup-peers again")
    found: dict[str, str] = json.loads(done.stdout)
    return found


Start = Callable[[Bed, str], contextlib.AbstractContextManager[Contender]]
"""Starts a peer with a name."""
Starts = Mapping[str, tuple[str, Start]]
"""For each name, the peer's package (as in :func:`installed`) and the function that starts it."""


def add_installed(field: Field, stack: contextlib.ExitStack, bed: Bed, starts: Starts) -> set[str]:
    """Start the installed peers, and return their names; ``field`` gets them, and the reason of each absent one."""
    versions = installed(bed.python)
    running = set()
    for name, (peer, start) in starts.items():
        if peer not in versions:
            field.absent[name] = NOT_INSTALLED
            continue
        try:
            contender = stack.enter_context(start(bed, name))
        except (ShadowServeError, OSError) as error:  # OSError: the package has no program
            field.absent[name] = does_not_run(error)
            continue
        field.contenders.append(dataclasses.replace(contender, note=versions[peer]))
        running.add(name)
    return running


def does_not_run(error: Exception) -> str:
    """Return the reason of a peer that did not start, in a line."""
    return f"does not run here: {str(error).partition(chr(10))[0]}"


@contextlib.contextmanager
def _server(bed: Bed, name: str, command: Sequence[str], ready: str) -> Iterator[Child]:
    """Run a peer's server at the stores' end of the network."""
    environment = ENVIRONMENT | {"LMCACHE_LOG_LEVEL": "INFO"}
    starting = started(
        name, command, bed.logs, ready=re.compile(ready), environment=environment, timeout_s=START_TIMEOUT_S
    )
    with contextlib.ExitStack() as stack:
        with bed.network.store_side():
            child = stack.enter_context(starting)
        yield child


@contextlib.contextmanager
def lmcache(bed: Bed, name: str) -> Iterator[Contender]:
    """LMCache's engine with its own remote store, ``lm://``, raw."""
    port = str(free_port())
    command = [str(bed.python.with_name("lmcache_server")), bed.network.host, port, "cpu"]
    with (
        _server(bed, "lmcache-remote", command, "Server started at") as server,
        _started(bed, "lmcache", "--address", f"{bed.network.host}:{port}") as client,
    ):
        yield client.contender(name, family(server.process.pid))


@contextlib.contextmanager
def lmcache_server(bed: Bed, name: str, l2: L2 = NO_L2) -> Iterator[Contender]:
    """LMCache's multiprocess mode: a server with shared memory to the worker, and a store behind it.

    Without an ``l2``, fetches come from the server's memory.
    """
    size = bed.chunks * bed.values_file.stat().st_size
    with contextlib.ExitStack() as stack:
        with bed.network.client_side():
            server = stack.enter_context(lmcache_daemon("lmcache-server", bed.python, bed.logs, size, l2))
        store = l2.redis.address if l2.redis is not None else str(l2.folder or "")
        flags = ["--address", server.address, "--http", server.http, "--store", store]
        flags += ["--lossy"] if l2.serde == "fp8" else []
        client = stack.enter_context(_started(bed, "lmcache-server", *flags))
        behind = [] if l2.redis is None else family(l2.redis.process.pid)
        contender = client.contender(name, [*family(server.child.process.pid), *behind])
        yield dataclasses.replace(contender, kind="compressing" if l2.serde else "raw")


@dataclass(frozen=True)
class LMCacheDaemon:
    """A running server of LMCache's multiprocess mode.

    Attributes:
        address: ``host:port`` of workers' connections.
        http: URL of its status.
    """

    child: Child
    address: str
    http: str


@contextlib.contextmanager
def lmcache_daemon(
    name: str,
    python: Path,
    logs: Path,
    size: int,
    l2: L2,
    *,
    strongest: bool = True,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> Iterator[LMCacheDaemon]:
    """Run a server of LMCache's multiprocess mode, one for a host.

    Args:
        size: Bytes that it has to hold; it gets half as much again.
        strongest: True for its fastest known configuration, with shared memory to the workers; otherwise that of
            its documentation for a host without a GPU, with the flags that it requires.
    """
    port, http = free_port(), free_port()
    flags = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--http-host": "127.0.0.1",
        "--http-port": str(http),
        "--l1-size-gb": str(max(1, -(-size * 3 // 2 >> 30))),
        "--eviction-policy": "LRU",
        "--chunk-size": str(chunk_tokens),
        "--supported-transfer-mode": "engine_driven",  # the default of a worker on a CPU
    }
    if strongest:
        flags |= {"--shm-name": f"shadowserve-bench-{port}", "--max-workers": "2"}
    environment = ENVIRONMENT | {"LMCACHE_LOG_LEVEL": "INFO"}
    if l2.serde == "shadowserve":
        environment["PYTHONPATH"] = str(product(logs / "product"))
    if below := l2.flag(workers=strongest):
        flags["--l2-adapter"] = json.dumps(below)
    with started(
        name,
        [str(python.with_name("lmcache")), "server"] + [word for pair in flags.items() for word in pair],
        logs,
        ready=re.compile("Uvicorn running on|Application startup complete"),
        environment=environment,
        timeout_s=START_TIMEOUT_S,
    ) as child:
        yield LMCacheDaemon(child, f"127.0.0.1:{port}", f"http://127.0.0.1:{http}")


def product(folder: Path) -> Path:
    """Return a folder with links to this project's packages, for an environment where it is not installed."""
    for name in ("shadowserve", "host_control"):
        package = folder / name
        package.mkdir(parents=True, exist_ok=True)
        for place in importlib.import_module(name).__path__:  # an editable install has two
            for entry in Path(place).iterdir():
                if entry.name != "__pycache__" and not (package / entry.name).exists():
                    (package / entry.name).symlink_to(entry)
    return folder


@contextlib.contextmanager
def mooncake(bed: Bed, name: str) -> Iterator[Contender]:
    """Mooncake's store over TCP: its master, a process with the chunks, and a reader."""
    port = free_port()
    command = [str(bed.python), "-m", "mooncake.cli", f"--rpc_address={bed.network.host}", f"--rpc_port={port}"]
    command.append(f"--metrics_port={free_port()}")
    address = ("--address", f"{bed.network.host}:{port}")
    with (
        _server(bed, "mooncake-master", command, "service_ready=true") as master,
        _started(bed, "mooncake-store", *address) as store,
        _started(bed, "mooncake", *address) as client,
    ):
        yield client.contender(name, [*family(master.process.pid), *store.processes])


@contextlib.contextmanager
def _started(bed: Bed, role: str, *flags: str) -> Iterator["_Driver"]:
    side = bed.network.store_side if role == "mooncake-store" else bed.network.client_side
    command = [str(bed.python), driver.__file__, role, "--values", str(bed.values_file), "--chunks", str(bed.chunks)]
    with side():
        client = _Driver(f"the peer '{role}'", [*command, *flags], bed.logs / f"{role}-driver.log", ENVIRONMENT)
    try:
        client.receive(START_TIMEOUT_S)
        yield client
    finally:
        client.stop()


class _Driver(JsonProcess):
    @property
    def processes(self) -> list[psutil.Process]:
        return family(self.process.pid)

    def contender(self, name: str, servers: list[psutil.Process]) -> Contender:
        """Return the driver with its servers as a contender."""
        return Contender(
            name=name,
            kind="raw",
            fetch=functools.partial(self._call, "fetch"),
            clear=functools.partial(self._call, "clear"),
            verify=functools.partial(self._call, "verify"),
            processes=[*self.processes, *servers],
        )

    def _call(self, what: Literal["fetch", "clear", "verify"], count: int = 0) -> None:
        self.send({"do": what, "count": count})
        self.receive(CALL_TIMEOUT_S)

"""The systems that ``bench serving`` compares, each set up as a user would, from its store to the engine's
connector.

Stores are at one end of a link. Engines are at the same end, and reach the stores over loopback, or at the other end.
"""

import contextlib
import json
import secrets
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil

from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.serving import Engine, Partition, plugin
from shadowserve_tools.bench.parts.workload import client
from shadowserve_tools.bench.peers.contender import family
from shadowserve_tools.bench.peers.installed import installed, lmcache_daemon
from shadowserve_tools.bench.peers.network import LOOPBACK, Network
from shadowserve_tools.processes import Child, start_data_plane, start_redis, start_storage, until

OFF: Final = "no cache"
OURS: Final = "ShadowServe, lossless"
OURS_LAYERS: Final = "ShadowServe, lossless, layer by layer"
LOCAL: Final = "LMCache, CPU tier"
REDIS: Final = "LMCache, Redis"
LOCAL_SHM: Final = "LMCache, CPU tier, shared memory"
REDIS_SHM: Final = "LMCache, Redis tuned, shared memory"
STORED_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class Site:
    """Placement of systems.

    Attributes:
        folder: Folder of logs.
        partition: Cores of the programs.
        network: Network with the stores at one end.
        peers_python: Python of the environment of scripts/setup-peers.
        size: Bytes of all KV.
    """

    folder: Path
    partition: Partition
    network: Network
    peers_python: Path
    size: int

    @property
    def sides(self) -> dict[bool, Callable[[], AbstractContextManager[None]]]:
        """Context of the engines' end of the network, for loopback (False) and for the link (True)."""
        sides = {False: self.network.store_side}
        return sides if self.network is LOOPBACK else sides | {True: self.network.client_side}


def _nothing(*_arguments: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class System:
    """A running cache of an engine; by default none.

    Attributes:
        name: Name in tables.
        linked: True if a link is between engine and store.
        brief: True if one request for each of half of the documents is enough.
        fills: False if it reads what another system has stored.
        often: True if it computes more documents than prompts are about, for a ratio of one per cent.
        side: Context of the engine's end of the network.
        transfer: Configuration of the engine's connector.
        processes: Processes of the system, the engine excluded.
        stored: Returns when the given number of chunks is stored.
        forget: Empties the caches between the engine and the store.
        packages: Additional Python packages of the engine.
        data_plane: Address of ShadowServe's data plane.
    """

    name: str = OFF
    linked: bool = False
    brief: bool = False
    fills: bool = True
    often: bool = False
    side: Callable[[], AbstractContextManager[None]] = nullcontext
    transfer: dict[str, Any] | None = None
    processes: Sequence[psutil.Process] = ()
    stored: Callable[[Engine, int], None] = _nothing
    forget: Callable[[], None] = _nothing
    packages: Sequence[Path] = field(default=())
    data_plane: str = ""


class Answers:
    """Answers of the systems. The same question about the same document must give the same tokens."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, int], tuple[str, list[int]]] = {}

    def check(self, system: str, document: int, question: int, result: dict[str, Any], cached: int) -> None:
        """Check a request's answer, and where its KV came from.

        Args:
            system: Name of the system.
            document: Number of the document.
            question: Number of the question.
            result: The engine's result.
            cached: Expected number of tokens that are not computed.

        Raises:
            ShadowServeError: The answer differs from the first system's, or :func:`check_cached` raises.
        """
        other, first = self._first.setdefault((document, question), (system, result["answer"]))
        if result["answer"] != first:
            about = f"{system}, question {question} about document {document}"
            raise ShadowServeError(f"{about}: the answer is {result['answer']}; of {other} it was {first}")
        check_cached(system, document, result, cached)


def check_cached(system: str, document: int, result: dict[str, Any], cached: int) -> None:
    """Check where a request's KV came from.

    Raises:
        ShadowServeError: It was computed instead of fetched, or fetched instead of computed.
    """
    if result["cached"] != cached:
        about = f"{system}, a question about document {document}"
        raise ShadowServeError(f"{about}: {result['cached']} tokens were not computed, instead of {cached}")


def ours(stack: ExitStack, site: Site) -> list[System]:
    """Start a storage node, and a data plane at each end, with their defaults.

    For each engine with the defaults there is one with ``layer_order``, on the same data plane.
    """
    network, cores = site.network, json.dumps(site.partition.data_plane)
    password = secrets.token_hex(16)  # required beyond loopback
    with network.store_side():
        storage = stack.enter_context(
            start_storage(
                site.folder, "--host", network.host, "--cores", cores,
                environment={"SHADOWSERVE_STORAGE_PASSWORD": password},
            )
        )  # fmt: skip
    systems = []
    for linked, side in site.sides.items():
        folder = site.folder / ("far" if linked else "near")
        folder.mkdir()
        address = f"unix:{folder}/dpu.sock"
        with side():
            plane = stack.enter_context(
                start_data_plane(
                    folder, storage.address, "--listen", address, "--cores", cores,
                    environment={"SHADOWSERVE_DPU_STORAGE_PASSWORD": password},
                )
            )  # fmt: skip
        # A late transfer must be measured as late, not computed instead.
        late = {"lookup_timeout_s": 60, "fetch_timeout_s": 60}
        config = {"data_plane": address, "identity_cache": str(site.folder / "content.json"), **late}
        processes = [psutil.Process(child.process.pid) for child in (storage, plane)]
        default = System(
            name=OURS,
            linked=linked,
            often=True,
            side=side,
            transfer=plugin(config),
            processes=processes,
            stored=lambda engine, _chunks: engine.call("settle"),
            data_plane=address,
        )
        layers = plugin(config | {"layer_order": True})
        systems += [default, replace(default, name=OURS_LAYERS, fills=False, transfer=layers)]
    return systems


def peers(stack: ExitStack, site: Site) -> tuple[list[System], dict[str, str]]:
    """Start LMCache's servers, with their own memory and with Redis, with defaults and in their strongest mode.

    Returns:
        The running systems, and the reason of each absent one by name.
    """
    absent: dict[str, str] = {}
    systems: list[System] = []
    there = "lmcache" in installed(site.peers_python)
    for strongest, local, redis in ((False, LOCAL, REDIS), (True, LOCAL_SHM, REDIS_SHM)):
        for name, start in ((local, _local), (redis, _redis)):
            if not there:
                absent[name] = "not installed (scripts/setup-peers)"
                continue
            try:
                systems += start(stack, site, name, strongest)
            except (ShadowServeError, OSError) as error:
                absent[name] = f"does not run here: {str(error).partition(chr(10))[0]}"
    return systems, absent


def _local(stack: ExitStack, site: Site, name: str, strongest: bool) -> list[System]:
    with site.network.store_side():
        return [_lmcache(stack, site, name, strongest)]


def _redis(stack: ExitStack, site: Site, name: str, strongest: bool) -> list[System]:
    with site.network.store_side():
        store = stack.enter_context(start_redis(site.folder, host=site.network.host, tuned=strongest))
    systems = []
    for linked, side in site.sides.items():
        with side():
            systems.append(_lmcache(stack, site, name, strongest, store, linked=linked))
    return systems


def _lmcache(
    stack: ExitStack, site: Site, name: str, strongest: bool, redis: Child | None = None, *, linked: bool = False
) -> System:
    """Start LMCache's server at this end of the network."""
    side = site.sides[linked]
    log = f"{name.replace(', ', '-').replace(' ', '-').lower()}-{'far' if linked else 'near'}"
    starting = lmcache_daemon(log, site.peers_python, site.folder, site.size, redis, strongest=strongest)
    daemon = stack.enter_context(starting)
    host, _, port = daemon.address.rpartition(":")

    def stored(_engine: Engine, chunks: int) -> None:
        with side():
            _await_chunks(f"{daemon.http}/status", chunks)
        if redis is not None:
            with site.network.store_side(), contextlib.closing(client(redis.address)) as server:
                stored_all = lambda: sum(b"@" in key for key in server.scan_iter(count=1000)) >= chunks  # noqa: E731
                until(stored_all, "Redis lacks chunks", STORED_TIMEOUT_S)

    def forget() -> None:
        with side():
            _request(f"{daemon.http}/cache/clear", b'{"tier": "l1"}')

    return System(
        name=name,
        linked=linked,
        brief=strongest,
        side=side,
        transfer={
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_extra_config": {"lmcache.mp.host": f"tcp://{host}", "lmcache.mp.port": int(port)},
        },
        processes=[each for child in (daemon.child, redis) if child for each in family(child.process.pid)],
        stored=stored,
        forget=forget if redis else _nothing,
        packages=list(site.peers_python.parents[1].glob("lib/python*/site-packages")),
    )


def _await_chunks(url: str, chunks: int) -> None:
    def there() -> bool:
        found = json.loads(_request(url))["storage_manager"]
        controller = found["store_controller"]
        moving = controller["pending_keys_count"] + controller["in_flight_task_count"]
        return bool(found["l1_manager"]["total_object_count"] >= chunks and not moving)

    until(there, "LMCache's server has not stored everything", STORED_TIMEOUT_S)


def _request(url: str, body: bytes | None = None) -> bytes:
    """Send a GET, or a POST with a body, to LMCache's server, without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=60) as answer:
        content: bytes = answer.read()
        return content

"""The systems that ``bench serving`` compares, each set up as a user would, from its store to the engine's
connector.

Stores are at one end of a link. Engines are at the same end, and reach the stores over loopback, or at the other end.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil

from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.serving import Engine, Host, check_cached
from shadowserve_tools.bench.parts.workload import client
from shadowserve_tools.bench.peers.contender import family
from shadowserve_tools.bench.peers.installed import L2, NOT_INSTALLED, does_not_run, installed, lmcache_daemon
from shadowserve_tools.bench.peers.network import LOOPBACK
from shadowserve_tools.processes import Child, http_request, start_redis, until

OFF: Final = "no cache"
OURS: Final = "ShadowServe, lossless"
OURS_WHOLE: Final = "ShadowServe, lossless, whole loads"
OURS_TIER: Final = "ShadowServe, lossless, memory tier"
OURS_NEAR: Final = "ShadowServe, near lossless"
LOCAL: Final = "LMCache, CPU tier"
REDIS: Final = "LMCache, Redis"
LOCAL_SHM: Final = "LMCache, CPU tier, shared memory"
REDIS_SHM: Final = "LMCache, Redis tuned, shared memory"
STORED_TIMEOUT_S: Final = 60.0

Side = Callable[[], AbstractContextManager[None]]


def sides(host: Host) -> dict[bool, Side]:
    """Return the context of the engines' end of the network, for loopback (False) and for the link (True)."""
    found: dict[bool, Side] = {False: host.network.store_side}
    return found if host.network is LOOPBACK else found | {True: host.network.client_side}


def _nothing(*_arguments: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class System:
    """A running cache of an engine; by default none.

    Attributes:
        fills: False if it reads what another system has stored.
        learns: True if it chooses by measured times, as an engine does that has run for a while.
        exact: True if its answers must equal those of an engine without a cache.
        processes: Processes of the system, the engine excluded.
        stored: Returns when the given number of chunks is stored.
        forget: Empties the caches between the engine and the store.
    """

    name: str = OFF
    linked: bool = False
    fills: bool = True
    learns: bool = False
    exact: bool = True
    side: Callable[[], AbstractContextManager[None]] = nullcontext
    transfer: dict[str, Any] | None = None
    processes: Sequence[psutil.Process] = ()
    stored: Callable[[Engine, int], None] = _nothing
    forget: Callable[[], None] = _nothing
    packages: Sequence[Path] = ()
    data_plane: str = ""


class Answers:
    """Answers of the systems. The same question about the same document must give the same tokens."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, int], tuple[str, list[int]]] = {}

    def check(self, system: System, document: int, question: int, result: dict[str, Any], cached: int) -> None:
        """Check a request's answer, and how many of its tokens were not computed."""
        about = f"{system.name}, question {question} about document {document}"
        if system.exact:
            other, first = self._first.setdefault((document, question), (system.name, result["answer"]))
            if result["answer"] != first:
                raise ShadowServeError(f"{about}: the answer is {result['answer']}; of {other} it was {first}")
        check_cached(result, cached, about)


def ours(host: Host, calibration: Path) -> list[System]:
    """Start a storage node, and a data plane at each end, with their defaults.

    For each engine with the defaults there is one whose loads are whole, and one with a ``calibration``, on the same
    data plane. Near the storage node there is also one whose data plane has a memory tier.
    """
    storage = host.start_storage()
    systems = []
    room = json.dumps({"memory_budget_bytes": 2 * host.load.documents * host.document_bytes + (64 << 20)})
    for linked, side in sides(host).items():
        plane = host.start_plane(storage.address, place="far" if linked else "near", side=side)
        default = System(
            name=OURS,
            linked=linked,
            learns=True,
            side=side,
            transfer=host.plugin(plane, layer_order="auto"),
            processes=[psutil.Process(child.process.pid) for child in (storage, plane)],
            stored=lambda engine, _chunks: engine.call("settle"),
            data_plane=plane.address,
        )
        whole = host.plugin(plane, layer_order=False)
        systems += [default, replace(default, name=OURS_WHOLE, fills=False, learns=False, transfer=whole)]
        near_lossless = {"quantizer": "near_lossless", "calibration": str(calibration)}
        transfer = host.plugin(plane, layer_order="auto", **near_lossless)
        systems.append(replace(default, name=OURS_NEAR, exact=False, transfer=transfer))
        if not linked:
            near = host.start_plane(storage.address, "--tiers", room, place="tier", side=side)
            systems.append(
                replace(
                    default,
                    name=OURS_TIER,
                    fills=False,
                    transfer=host.plugin(near, layer_order="auto"),
                    processes=[psutil.Process(child.process.pid) for child in (storage, near)],
                    data_plane=near.address,
                )
            )
    return systems


def peers(host: Host, python: Path, size: int) -> tuple[list[System], dict[str, str]]:
    """Start LMCache's servers, with their own memory and with Redis, with defaults and in their strongest mode.

    Args:
        size: Bytes of all KV.

    Returns:
        The running systems, and the reason of each absent one by name.
    """
    absent: dict[str, str] = {}
    systems: list[System] = []
    there = "lmcache" in installed(python)
    for name, in_redis, strongest in (
        (LOCAL, False, False), (REDIS, True, False), (LOCAL_SHM, False, True), (REDIS_SHM, True, True),
    ):  # fmt: skip
        if not there:
            absent[name] = NOT_INSTALLED
            continue
        try:
            redis = None
            own: list[System] = []  # of near and far, both or none
            if in_redis:
                with host.network.store_side():
                    redis = host.stack.enter_context(start_redis(host.folder, host=host.network.host, tuned=strongest))
            for linked, side in sides(host).items():
                if in_redis or not linked:
                    own.append(lmcache(host, python, size, name, strongest, redis, linked, side))
            systems += own
        except (ShadowServeError, OSError) as error:
            absent[name] = does_not_run(error)
    return systems, absent


def lmcache(
    host: Host, python: Path, size: int, name: str, strongest: bool, redis: Child | None, linked: bool, side: Side,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> System:  # fmt: skip
    """Start LMCache's server, for engines at one end of the network.

    Args:
        size: Bytes that it holds in memory.
        redis: Its L2.
    """
    log = f"{name.replace(', ', '-').replace(' ', '-').lower()}-{'far' if linked else 'near'}"
    with side():
        daemon = host.stack.enter_context(
            lmcache_daemon(
                log, python, host.folder, size, L2(redis=redis), strongest=strongest, chunk_tokens=chunk_tokens
            )
        )
    address, _, port = daemon.address.rpartition(":")

    def in_memory(chunks: int) -> bool:
        with http_request(f"{daemon.http}/status") as answer:
            found = json.load(answer)["storage_manager"]
        controller = found["store_controller"]
        moving = controller["pending_keys_count"] + controller["in_flight_task_count"]
        return bool(found["l1_manager"]["total_object_count"] >= chunks and not moving)

    def stored(_engine: Engine, chunks: int) -> None:
        with side():
            until(lambda: in_memory(chunks), "LMCache's server has not stored everything", STORED_TIMEOUT_S)
        if redis is not None:
            with host.network.store_side(), contextlib.closing(client(redis.address)) as server:
                stored_all = lambda: sum(b"@" in key for key in server.scan_iter(count=1000)) >= chunks  # noqa: E731
                until(stored_all, "Redis lacks chunks", STORED_TIMEOUT_S)

    def forget() -> None:
        with side(), http_request(f"{daemon.http}/cache/clear", {"tier": "l1"}) as answer:
            answer.read()

    return System(
        name=name,
        linked=linked,
        side=side,
        transfer={
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_extra_config": {"lmcache.mp.host": f"tcp://{address}", "lmcache.mp.port": int(port)},
        },
        processes=[each for child in (daemon.child, redis) if child for each in family(child.process.pid)],
        stored=stored,
        forget=forget if redis else _nothing,
        packages=list(python.parents[1].glob("lib/python*/site-packages")),
    )

"""Faults between publishing keys and storing them: a waiting lookup or load ends with one reason.

With real storage nodes and data planes, and the engines' lookups, stores and loads without vLLM.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from machine import WAIT_MAX_S, free_port, wait_for
from redis import Redis
from stack import Process, data_plane

from host_control.client import DataPlaneClient
from host_control.disaggregation import Available, Disaggregation
from host_control.lookup import LookupAnswer, PrefixLookup
from host_control.manager import FetchJob, FetchResult, KVCacheManager
from host_control.registered_memory import RegisteredMemory
from host_control.store import StoreQueue
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import prefix_chain, record_keys, storage_key
from shadowserve.pieces import Flags, leading

CHUNK = 4
TOKENS = list(range(6 * CHUNK))
SHAPE = ChunkLayout(
    namespace=b"n" * 32,
    dtype=DType.FLOAT32,
    layers=2,
    kinds=2,
    vector_length=8,
    tokens=CHUNK,
    quantizer=Quantizer.LOSSLESS,
)
LINKS = prefix_chain(b"m" * 32, TOKENS, chunk_tokens=CHUNK)
KEYS = record_keys(SHAPE.namespace, LINKS)


def leading_tokens(present: Sequence[Flags], tokens: int) -> int:
    return leading(present[0]) * CHUNK


class Sides:
    """A storage node, with data planes, lookups, stores and loads of a prefill and a decode engine."""

    def __init__(self, *, loads_wait: bool) -> None:
        self.storage = Process("storage", "--port", str(free_port()))
        self.planes = [data_plane(self.storage.address) for _ in range(2)]
        self.clients = [DataPlaneClient(plane.address, connect_timeout_s=WAIT_MAX_S) for plane in self.planes]
        self.lookups = []
        for client in self.clients:
            assert client.wait_ready(WAIT_MAX_S)
            groups = [[(client, SHAPE.namespace)]]
            lookup = PrefixLookup(
                b"m" * 32, groups, leading_tokens, chunk_tokens=CHUNK, timeout=WAIT_MAX_S, loads_wait=loads_wait
            )
            self.lookups.append(lookup)
        self.prefill, self.decode = self.lookups
        size = 2 * len(KEYS) * SHAPE.raw_bytes
        made = [RegisteredMemory(client, [SHAPE], size, connect_timeout_s=WAIT_MAX_S) for client in self.clients]
        self.scattered: dict[int, bytes] = {}
        self.queue = StoreQueue(self.clients[0], made[0], timeout=WAIT_MAX_S)
        self.manager = KVCacheManager(self.clients[1], made[1], self._scatter, fetch_timeout_s=WAIT_MAX_S)
        assert self.queue.wait_tried(WAIT_MAX_S)

    def publish(self, seconds: float) -> None:
        """The prefill engine looks the prompt up and publishes its keys."""
        self.prefill.submit("r", TOKENS, disaggregation=Disaggregation(publishes=seconds))
        assert wait_for(lambda: self.prefill.poll("r")) == LookupAnswer(0, "complete")

    def wait(self, name: str = "r") -> None:
        """The decode engine starts to wait for the published keys."""

        def waits() -> bool:
            self.decode.forget(name)
            self.decode.submit(name, TOKENS, disaggregation=Disaggregation(waits=WAIT_MAX_S))
            wait_for(lambda: self.decode.poll(name) or self.decode.publications._waits)
            return self.decode.poll(name) is None

        wait_for(waits)

    def answer(self, name: str = "r") -> LookupAnswer:
        found: LookupAnswer = wait_for(lambda: self.decode.poll(name))
        return found

    def _scatter(self, job: FetchJob, part: int, first: int, chunks: Any) -> None:
        for index in range(len(chunks) // SHAPE.raw_bytes):
            self.scattered[first + index] = bytes(chunks[index * SHAPE.raw_bytes :][: SHAPE.raw_bytes])

    def store(self, first: int, end: int) -> None:
        """The prefill engine stores chunks; chunk i is filled with byte i + 1."""

        def gather(index: int, chunk: Any) -> None:
            chunk[:] = bytes([first + index + 1]) * SHAPE.raw_bytes

        assert self.queue.offer(KEYS[first:end], gather, chained=False, published=True) == end - first
        assert self.queue.flush(WAIT_MAX_S)
        self.prefill.publications.computed("r", LINKS[first:end])

    def begin(self) -> None:
        """The decode engine loads the available chunks and waits for the others."""
        self.decode.submit("r", TOKENS, disaggregation=Disaggregation(waits=WAIT_MAX_S))
        assert self.answer() == LookupAnswer(len(TOKENS), "complete")
        arrived = self.decode.available("r")
        self.manager.exchange([FetchJob(request_id="r", keys=(tuple(KEYS),), available=arrived)])
        there = arrived.chunks if arrived else 0
        wait_for(lambda: len(self.scattered) == there and any(each.waits() for each in self.manager._queue))

    def published(self) -> int:
        """Return the number of published chunks in the decode engine's lookup."""
        (chain,) = self.clients[1].find([(SHAPE.namespace, KEYS)], WAIT_MAX_S)()
        return int(chain.pending.sum()) if chain.pending is not None else 0

    def result(self) -> FetchResult:
        """Return the result of the load. Each step passes the number of available chunks to the worker."""

        def step() -> list[FetchResult]:
            return self.manager.exchange(available={"r": self.decode.available("r") or Available(0, "")})

        (result,) = wait_for(step)
        return result

    def close(self) -> None:
        self.queue.close(0.1)
        self.manager.close(WAIT_MAX_S)
        for part in (*self.lookups, *self.clients):
            part.close()
        for process in (*self.planes, self.storage):
            process.stop()


@pytest.fixture
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    with closing(Sides(loads_wait=getattr(request, "param", True))) as sides:
        yield sides


@pytest.mark.parametrize("sides", [False], indirect=True)
def test_keys_are_published_again_after_a_storage_restart_and_expire_after_a_crash(sides: Sides) -> None:
    sides.publish(2.0)
    sides.wait()
    sides.storage.kill()
    assert sides.answer().reason == "storage_unavailable"
    sides.storage.restart()
    sides.wait("again")
    sides.prefill.close()  # like a crashed engine, it neither renews nor withdraws them
    answer = sides.answer("again")
    assert (answer.tokens, answer.reason) == (0, "published_gone")


def store_garbage(sides: Sides) -> None:
    with Redis.from_url(f"redis://{sides.storage.address}") as connection:
        for key in KEYS[2:]:
            connection.set(storage_key(key), b"no record of anything")


WHILE_IT_LOADS: dict[str, tuple[Callable[[Sides], Any], int, set[str]]] = {
    "all chunks are stored": (lambda sides: sides.store(2, 6), 6, {"complete"}),
    "a chunk is withdrawn": (lambda sides: (sides.store(2, 4), sides.prefill.forget("r")), 4, {"published_gone"}),
    "stored chunks are invalid": (store_garbage, 2, {"published_gone"}),
    "the prefill engine's data plane is killed": (lambda sides: sides.planes[0].kill(), 2, {"published_gone"}),
    "the storage node is killed": (lambda sides: sides.storage.kill(), 2, {"storage_unavailable"}),
    "the decode engine's data plane is killed": (lambda sides: sides.planes[1].kill(), 2, {"unreachable"}),
}


@pytest.mark.parametrize("event", WHILE_IT_LOADS)
def test_a_running_load_ends_with_the_available_chunks_and_one_reason(sides: Sides, event: str) -> None:
    happen, chunks, reasons = WHILE_IT_LOADS[event]
    sides.publish(WAIT_MAX_S)
    wait_for(lambda: sides.published() == len(KEYS))
    sides.store(0, 2)
    sides.begin()
    happen(sides)
    result = sides.result()
    assert result.chunks == (chunks,) and result.reason in reasons, result
    assert sides.scattered == {index: bytes([index + 1]) * SHAPE.raw_bytes for index in range(chunks)}

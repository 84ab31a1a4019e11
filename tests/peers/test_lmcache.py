"""LMCache's server with ShadowServe's serde and with a storage node as its L2: exact objects, or a miss.

LMCache's own worker client stores and retrieves. Its L1 is emptied between, so that everything comes from L2.
"""

import contextlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from machine import NEVER_S

from host_control.lmcache import objects
from host_control.lmcache.choice import COMPUTE, LOAD
from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.workload import made_up_slices
from shadowserve_tools.bench.peers.contender import Contender
from shadowserve_tools.bench.peers.installed import ENVIRONMENT, Adapter, Bed, Serde, lmcache_server, product
from shadowserve_tools.processes import start_storage

CHUNKS, LAYERS = 3, 4
KV = objects.Array((2, LAYERS, 256, 1024), "bfloat16")
KEY = re.compile(r"(?P<model>[^@]+)@(0x)?(?P<rank>[0-9a-f]{8})@(?P<group>[0-9a-f]+)@(?P<hash>[0-9a-f]+)(\.data)?")


class Key(NamedTuple):
    """LMCache's key, read from the name of a stored object."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int
    cache_salt: str = ""

    @classmethod
    def of(cls, name: str) -> "Key":
        found = KEY.fullmatch(name)
        assert found is not None, name
        return cls(bytes.fromhex(found["hash"]), found["model"], int(found["rank"], 16), int(found["group"], 16))


class Folder:
    """Stored objects by name, in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write(self, name: str, value: bytes) -> None:
        (self._folder / name).write_bytes(value)


class Node:
    """Stored objects by name, in a storage node."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def names(self) -> list[str]:
        return sorted(key.decode() for key in self._client.scan_iter(match="*@*"))

    def read(self, name: str) -> bytes:
        value: bytes = self._client.get(name)
        return value

    def write(self, name: str, value: bytes) -> None:
        assert self._client.set(name, value)


class LMCache(NamedTuple):
    contender: Contender
    store: Folder | Node

    def misses(self) -> bool:
        """Return whether a lookup of all chunks finds none; the chunks are then computed."""
        self.contender.clear()
        try:
            self.contender.fetch(CHUNKS)
        except ShadowServeError as error:
            assert f"LOOKUP found 0 of {CHUNKS} chunks" in str(error)
            return True
        self.contender.verify(CHUNKS)
        return False


@contextlib.contextmanager
def started(logs: Path, store: str, serde: Serde) -> Iterator[LMCache]:
    values = logs / "values"
    values.write_bytes(made_up_slices(LAYERS, 1024).tobytes())
    bed = Bed(Path(os.environ["PEERS_PYTHON"]), logs, values, CHUNKS)
    with contextlib.ExitStack() as stack:
        if store == "files":
            folder = logs / "files"
            folder.mkdir()
            contender = stack.enter_context(lmcache_server(bed, "LMCache", folder=folder, serde=serde))
            yield LMCache(contender, Folder(folder))
            return
        node = stack.enter_context(start_storage(logs))
        client = stack.enter_context(redis.Redis.from_url(f"redis://{node.address}"))
        adapter: Adapter = "valkey" if store == "valkey" else "resp"
        contender = stack.enter_context(lmcache_server(bed, "LMCache", redis=node, serde=serde, adapter=adapter))
        yield LMCache(contender, Node(client))


@pytest.fixture(scope="module", params=["files", "resp", "valkey"])
def lossless(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCache]:
    """LMCache with the serde, over each kind of L2."""
    with started(tmp_path_factory.mktemp("lmcache"), request.param, "shadowserve") as lmcache:
        yield lmcache


@pytest.mark.parametrize("store", ["resp", "valkey"])
def test_a_storage_node_is_the_l2_of_lmcache_without_our_code(tmp_path: Path, store: str) -> None:
    with started(tmp_path, store, "") as lmcache:
        lmcache.contender.run(CHUNKS)
        assert [len(lmcache.store.read(name)) for name in lmcache.store.names()] == [4 << 20] * CHUNKS


def test_objects_come_back_exactly_from_two_thirds_of_the_bytes(lossless: LMCache) -> None:
    lossless.contender.run(CHUNKS)
    names = lossless.store.names()
    assert len(names) == CHUNKS
    for name in names:
        assert len(lossless.store.read(name)) == objects.stored_bytes([KV]) <= 0.68 * (4 << 20)


def test_a_damaged_object_is_a_miss(lossless: LMCache) -> None:
    (name, *_) = lossless.store.names()
    value = lossless.store.read(name)
    damaged = bytearray(value)
    damaged[1 << 20] ^= 4
    lossless.store.write(name, bytes(damaged))
    assert lossless.misses()
    lossless.store.write(name, value)
    assert not lossless.misses()


def test_an_object_of_another_model_or_chunk_is_a_miss(lossless: LMCache) -> None:
    name, other, *_ = lossless.store.names()
    value, key = lossless.store.read(name), Key.of(name)
    kv, stored = bytearray(4 << 20), bytearray(len(value))
    objects.decode(key, [KV], memoryview(value), memoryview(kv))
    objects.encode(key._replace(model_name="another/model"), [KV], memoryview(kv), memoryview(stored))
    for wrong in (bytes(stored), lossless.store.read(other)):
        lossless.store.write(name, wrong)
        assert lossless.misses()
    objects.encode(key, [KV], memoryview(kv), memoryview(stored))
    lossless.store.write(name, bytes(stored))
    assert not lossless.misses()


def test_the_next_version_takes_our_load_policy(tmp_path: Path) -> None:
    configs = {
        COMPUTE: {n: 1e-4 * n for n in (1000, 4000, 16_000)},
        LOAD: {n: 0.2 + 1e-5 * n for n in (1000, 4000, 16_000)},
    }
    policy = "host_control.lmcache.load_policy:FetchOrRecompute"
    program = f"""
import json
from lmcache.v1.multiprocess.kv_load_policy import KVLoadContext, create_kv_load_policy
policy = create_kv_load_policy({policy!r}, json.loads({json.dumps(json.dumps(configs))}))
for tokens, request in (
    (512, None), (8192, None), (8192, {{"lmcache.hint.engine_computed_tokens": 7680}}),
    (8192, {{"lmcache.skip_load": True}}),
):
    loads = policy.should_load(KVLoadContext("request", "team/model", 256, tokens, request))
    print("loads", loads)
"""
    path = os.pathsep.join([os.environ["LMCACHE_NEXT"], str(product(tmp_path))])
    python = [os.environ["PEERS_PYTHON"], "-c", program]
    done = subprocess.run(
        python, env=ENVIRONMENT | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=NEVER_S
    )
    said = re.findall("^loads (.*)$", done.stdout, re.MULTILINE)
    assert said == ["False", "True", "False", "False"], done.stderr[-2000:]

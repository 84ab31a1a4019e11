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
from shadowserve_tools.bench.peers.installed import ENVIRONMENT, IDENTITY, L2, Bed, Serde, lmcache_server, product
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
            contender = stack.enter_context(lmcache_server(bed, "LMCache", L2(folder=folder, serde=serde)))
            yield LMCache(contender, Folder(folder))
            return
        node = stack.enter_context(start_storage(logs))
        client = stack.enter_context(redis.Redis.from_url(f"redis://{node.address}"))
        l2 = L2(redis=node, serde=serde, adapter="valkey" if store == "valkey" else "resp")
        contender = stack.enter_context(lmcache_server(bed, "LMCache", l2))
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
    objects.decode(key, [KV], memoryview(value), memoryview(kv), IDENTITY)
    objects.encode(key._replace(model_name="another/model"), [KV], memoryview(kv), memoryview(stored), IDENTITY)
    for wrong in (bytes(stored), lossless.store.read(other)):
        lossless.store.write(name, wrong)
        assert lossless.misses()
    objects.encode(key, [KV], memoryview(kv), memoryview(stored), IDENTITY)
    lossless.store.write(name, bytes(stored))
    assert not lossless.misses()


def run_in_lmcache(folder: Path, program: str, *first: str) -> subprocess.CompletedProcess[str]:
    """Run a program in LMCache's environment; the packages of ``first`` hide its own."""
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([*first, str(product(folder))])}
    python = [os.environ["PEERS_PYTHON"], "-c", program]
    return subprocess.run(python, env=environment, capture_output=True, text=True, timeout=NEVER_S)


def test_objects_that_do_not_fit_are_left_out_of_their_batch(tmp_path: Path) -> None:
    program = """
import os, select, sys, torch
from host_control.lmcache import serde
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor

l1 = L1Manager(L1ManagerConfig(L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name="")))
processor = create_serde_processor(SerdeConfig("shadowserve", {"identity": "weights"}))
inner = serde.Adapter({"type": "fs_native", "base_path": sys.argv[1]})
adapter = SerdeL2AdapterWrapper(inner, processor, l1)

def batch(first, *tokens_and_noise):
    keys, buffers = [], []
    for number, (tokens, noise) in enumerate(tokens_and_noise, first):
        key = ObjectKey(bytes([number]) * 32, "model", 0, 0)
        layout = MemoryLayoutDesc([torch.Size([2, 2, tokens, 128])], [torch.bfloat16])
        buffer = l1.reserve_write([key], [False], layout, "test")[key][1]
        torch.manual_seed(number)
        values = torch.randn(layout.shapes[0]).bfloat16()
        bits = torch.randint(-(1 << 15), 1 << 15, values.shape, dtype=torch.int16)
        buffer.tensor.copy_(bits.view(torch.bfloat16) if noise else values)
        keys.append(key)
        buffers.append(buffer)
    return keys, buffers

def wait(fd, ask):
    while not (result := ask()):
        assert select.select([fd], [], [], 60)[0]
        os.read(fd, 8)
    return result

def store(keys, buffers):
    task = adapter.submit_store_task(keys, buffers)
    done = wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    return done[task].is_successful()

def load(keys, buffers):
    before = [bytes(each.byte_array) for each in buffers]
    for each in buffers:
        each.tensor.zero_()
    task = adapter.submit_load_task(keys, buffers)
    found = wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    hits = [found.test(number) for number in range(len(keys))]
    return hits, [was == bytes(each.byte_array) for was, each in zip(before, buffers)]

keys, buffers = batch(1, (256, False), (256, True), (256, False))
print("said", store(keys, buffers), *load(keys, buffers))
print("said", store(*batch(4, (256, True), (256, True))))
keys, buffers = batch(6, (512, False), (1024, False), (256, False))
print("said", store(keys, buffers), load(keys[:1], buffers[:1]), load(keys[2:], buffers[2:]))
print("said", len(os.listdir(sys.argv[1])), flush=True)
os._exit(0)
"""
    folder = tmp_path / "l2"
    folder.mkdir()
    done = run_in_lmcache(tmp_path, f"import sys\nsys.argv[1:] = [{str(folder)!r}]\n{program}")
    assert re.findall("^said (.*)$", done.stdout, re.MULTILINE) == [
        "True [True, False, True] [True, False, True]",
        "False",
        "True ([True], [True]) ([True], [True])",
        "4",
    ], done.stdout[-1000:] + done.stderr[-3000:]
    said = done.stdout + done.stderr
    assert said.count("objects not stored since the start") == 1 and "set its 'size' to at least" in said
    assert "Traceback" not in said


def test_the_serde_needs_an_identity(tmp_path: Path) -> None:
    program = """
from host_control.lmcache import serde
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
create_serde_processor(SerdeConfig("shadowserve", {}))
"""
    done = run_in_lmcache(tmp_path, program)
    assert "ConfigurationError: serde 'shadowserve': identity is None; set a text" in done.stderr


@pytest.mark.skipif("LMCACHE_NEXT" not in os.environ, reason="the next version of LMCache is not available")
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
    done = run_in_lmcache(tmp_path, program, os.environ["LMCACHE_NEXT"])
    said = re.findall("^loads (.*)$", done.stdout, re.MULTILINE)
    assert said == ["False", "True", "False", "False"], done.stderr[-2000:]

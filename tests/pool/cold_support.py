"""Helpers of the bucket's tests: pools over a bucket, and chains of records."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from faulty_s3 import BUCKET, FaultyS3
from machine import wait_for
from pool_support import file_pool
from store_driver import Driver, taken

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import storage_key
from shadowserve.pool.cold import writes
from shadowserve.pool.cold.config import S3Config
from shadowserve.pool.cold.layout import Place, finish
from shadowserve.pool.cold.tier import ColdTier
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.memory_pool import MemoryPool
from shadowserve.pool.pool import Pool
from shadowserve.pool.statistics import ColdStatistics

MIB = 1 << 20
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secret"}

Opens = Callable[..., "Node"]
Record = tuple[bytes, bytes, int, bytes]
"""Name, value, bytes of the header, and name of the previous record."""


class Node(Driver):
    """A pool with a bucket below."""

    def cold(self) -> ColdStatistics:
        return self.statistics().cold

    def store_records(self, records: Iterable["Record"], tenant: int = 0) -> None:
        for name, value, header_bytes, parent in records:
            self.put(storage_key(name), value, tenant, header_bytes=header_bytes, parent=parent)

    def store_chain(self, chain: "Chain", tenant: int = 0) -> None:
        self.store_records(chain.records, tenant)

    def write_chains(self, chains: Iterable["Chain"], tenant: int = 0) -> None:
        """Store each chain once the objects of those before are in the bucket."""
        for chain in chains:
            before = self.cold().written_objects
            self.store_chain(chain, tenant)
            self.await_written(before + 1)

    def await_written(self, count: int) -> None:
        """Wait until no write waits, and this node has written ``count`` objects."""
        wait_for(lambda: self.cold().written_objects >= count and not self.cold().waiting_records)

    def await_known(self, records: int) -> None:
        wait_for(lambda: self.cold().records == records)

    def await_listed(self) -> None:
        """Wait for another list of the bucket."""
        before = self.cold().lists
        wait_for(lambda: self.cold().lists > before + 1)

    def read_chain(self, chain: "Chain", tenant: int = 0) -> list[bytes | None]:
        """Return all values of a chain, read concurrently."""
        return taken([self.open(storage_key(name), tenant=tenant) for name, *_ in chain.records])


class Chain:
    """Consecutive records of one partition."""

    def __init__(self, label: str, count: int, body_bytes: int = 4096, partition: int | None = None) -> None:
        layout = ChunkLayout(
            namespace=b"n" * 32,
            dtype=DType.UINT8,
            layers=2,
            kinds=2,
            vector_length=max(64, body_bytes // 64),
            tokens=16,
            quantizer=Quantizer.PASSTHROUGH,
        )
        self.records: list[Record] = []
        parent, end = b"", hashlib.sha256(label.encode()).digest()[:8]
        end = end if partition is None else partition.to_bytes(2, "big") + end[2:]
        for number in range(count):
            name = hashlib.sha256(f"{label} {number}".encode()).digest()[:24] + end
            kv = bytes([number % 251]) * layout.raw_bytes
            value = record.encode(name, native.Codec.NONE, layout, kv, parent=parent)
            self.records.append((name, value, record.parse_header(value).header_length, parent))
            parent = name

    def object(self, tenant: str = "") -> tuple[str, bytes]:
        """Return the name and the bytes of an object with these records."""
        body, places = bytearray(), []
        for key, value, header_bytes, _ in self.records:
            places.append((key, Place(len(body), len(value), header_bytes)))
            body += value
        return finish(body, tenant, places).name, bytes(body)

    @property
    def values(self) -> list[bytes]:
        return [value for _, value, _, _ in self.records]

    @property
    def keys(self) -> list[bytes]:
        return [storage_key(name) for name, *_ in self.records]


def written(open_node: Opens, chain: Chain) -> Node:
    """Return a node that has stored a chain, and written it at once as an object with most records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writes, "RECORDS_MAX", len(chain.records))
        node = open_node(gather_s=0.5)
    node.store_chain(chain)
    node.await_written(1)
    return node


def s3_config(endpoint: str, **keys: Any) -> S3Config:
    """Return the configuration of a tier that lists often and writes at once."""
    given = {"bucket": BUCKET, "endpoint": endpoint, "gather_s": 0.0, "index_ttl_s": 0.1, "timeout_s": 20.0}
    return S3Config(**{**given, "object_bytes": 8 * MIB, **keys})


def memory_node(
    endpoint: str,
    *,
    memory_budget_bytes: int = 64 * MIB,
    quotas: Mapping[str, tuple[int | None, int | None]] = MappingProxyType({}),
    clock_s: Callable[[], float] = time.monotonic,
    serves: Callable[[int], bool] | None = None,
    **keys: Any,
) -> Node:
    """Return a node without devices; ``quotas``: bytes and keys of tenants; ``serves``: its partitions in a fleet."""
    below = ColdTier(s3_config(endpoint, **keys), clock_s, serves)
    for tenant, quota in quotas.items():
        below.set_quota(tenant, *quota)
    return Node(MemoryPool(PoolConfig(memory_budget_bytes=memory_budget_bytes), lower_tier=below))


def device_node(endpoint: str, path: Path, **keys: Any) -> Node:
    """Return a node with 4 MiB of memory over a file of 12 MiB."""
    below = ColdTier(s3_config(endpoint, **keys))
    return Node(file_pool([path], 12 * MIB, memory_budget_bytes=4 * MIB, below=below))


@contextlib.contextmanager
def nodes(server: FaultyS3) -> Iterator[Opens]:
    """Yield a function that opens nodes over a bucket; they are closed with the test."""
    opened: list[Pool] = []

    def open_node(**keys: Any) -> Node:
        node = memory_node(server.endpoint, **keys)
        opened.append(node.store)
        return node

    try:
        yield open_node
    finally:
        for store in opened:
            store.close()

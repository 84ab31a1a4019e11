"""Reads of the bucket by several clients at a time: of the same record, in parts, and without memory."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from cold_support import MIB, Chain, Node, Opens, written
from faulty_s3 import Answer, FaultyS3
from machine import wait_for

from shadowserve.pool.cold import reads
from shadowserve.pool.types import Lease


def reader(open_node: Opens, chain: Chain, **keys: Any) -> Node:
    """Return a node that knows the records of a chain, which another one has stored in one object."""
    written(open_node, chain)
    other = open_node(reads_at_once=1, **keys)
    other.await_known(len(chain.records))
    return other


def read_range(node: Node, key: bytes, start: int, end: int) -> Callable[[], bytes | None]:
    """Begin to read a range that the node does not keep; return a function that waits for it."""
    found: list[Lease | None] = []
    with node.lock:
        item = node.store.peek((0, key))
        node.store.read(item, start, end, found.append, in_parts=True)

    def wait() -> bytes | None:
        wait_for(lambda: found)
        return None if found[0] is None else bytes(found[0].view)

    return wait


def test_a_range_and_all_of_a_record_that_wait_together_are_read(bucket: FaultyS3, open_node: Opens) -> None:
    chain = Chain("both", 4)
    node = reader(open_node, chain)
    gate, before = bucket.hold("get"), bucket.count("get")
    first = node.open(chain.keys[0])
    wait_for(lambda: bucket.count("get") > before)
    part, whole = read_range(node, chain.keys[2], 0, 100), node.open(chain.keys[2])
    gate.set()
    assert part() == chain.values[2][:100]
    assert whole.wait() == chain.values[2]
    assert first.wait() == chain.values[0]


def test_a_record_for_which_there_is_no_memory_is_a_miss_and_is_read_later(
    monkeypatch: pytest.MonkeyPatch, open_node: Opens
) -> None:
    chain = Chain("large", 1, 3 * MIB)
    node = reader(open_node, chain)

    def refuse(size: int) -> memoryview:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(reads, "allocate", refuse)
        reading = node.open(chain.keys[0], 0, 100, ahead=True)
        assert reading.wait() is None
    assert node.value(chain.keys[0]) == chain.values[0]


def test_a_client_that_joins_a_read_in_parts_waits_no_longer_than_timeout_s(bucket: FaultyS3, open_node: Opens) -> None:
    chain, now_s = Chain("large", 1, 4 * MIB), [1000.0]
    node = reader(open_node, chain, timeout_s=20.0, clock_s=lambda: now_s[0])
    gates = [threading.Event() for _ in range(6)]
    gates[0].set()
    bucket.fault = lambda of: None if of.range is None else Answer(after=gates[of.range[0] // MIB])
    header = node.open(chain.keys[0], 0, 100, ahead=True)
    assert header.wait() == chain.values[0][:100]
    whole, second = node.open(chain.keys[0]), node.open(chain.keys[0], 0, MIB, ahead=True)
    now_s[0] += 15
    gates[1].set()
    assert second.wait() == chain.values[0][:MIB]  # the read itself has another 20 s
    now_s[0] += 10
    assert whole.wait() is None
    for gate in gates:
        gate.set()
    assert node.value(chain.keys[0]) == chain.values[0]
    assert not node.cold().failed_reads

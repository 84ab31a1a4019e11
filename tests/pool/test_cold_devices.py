"""A bucket below a pool with devices and ``write: evicted``: evicted records are in the bucket."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cold_support import Chain, Node, device_node, nodes
from faulty_s3 import FaultyS3
from machine import wait_for
from pool_support import drop_copies

from shadowserve.keys import storage_key

FITS = Chain("fits", 16, 1 << 17)
"""2 MiB: they fit on the device."""
MORE = Chain("more", 96, 1 << 17)
"""12 MiB: they do not fit on the device."""


@pytest.fixture
def node(bucket: FaultyS3, tmp_path: Path) -> Iterator[Node]:
    made = device_node(bucket.endpoint, tmp_path / "device", write="evicted", timeout_s=1.0)
    yield made
    made.store.close()


def in_memory(node: Node, chain: Chain) -> int:
    """Return the number of a chain's records in memory."""
    items = [node.peek(key) for key in chain.keys]
    return sum(item is not None and item.value is not None for item in items)


def values(node: Node, chain: Chain) -> list[bytes | None]:
    """Read the records of a chain in order: the memory is too small for all of them."""
    return [node.value(key) for key in chain.keys]


def cool(node: Node) -> None:
    """Move all of the pool's values to the device alone."""
    node.pump(lambda: not node.store.busy)
    drop_copies(node)


def test_only_evicted_records_are_written_to_the_bucket_and_read_back(node: Node, bucket: FaultyS3) -> None:
    node.store_chain(FITS)
    cool(node)
    assert in_memory(node, FITS) == 0, "the records must be read from the device"
    assert not bucket.objects and node.cold().waiting_records == len(FITS.records)
    node.store_chain(MORE)
    statistics = node.statistics()
    assert statistics.evicted_keys > 0 and node.cold().held_back > 0
    assert node.cold().missed_records == 0, "no record must be evicted before its write"
    assert 0 < node.cold().written_objects < statistics.evicted_keys, "consecutive records must share an object"
    assert values(node, FITS) == FITS.values
    assert values(node, MORE) == MORE.values
    assert node.cold().read_records > 0


def test_a_restarted_node_serves_its_device_and_the_bucket(node: Node, bucket: FaultyS3, tmp_path: Path) -> None:
    node.store_chain(FITS)
    node.store_chain(MORE)
    node.stop()
    again = device_node(bucket.endpoint, tmp_path / "device", write="evicted")
    try:
        assert again.statistics().keys > 0, "the device must keep its records"
        again.await_listed()
        newest_first = [again.value(key) for key in [*FITS.keys, *MORE.keys][::-1]]
        assert newest_first == [*FITS.values, *MORE.values][::-1]
        assert 0 < again.cold().read_records < len(newest_first), "some records must come from the device"
    finally:
        again.store.close()


def test_another_node_finds_exactly_the_written_records(node: Node, bucket: FaultyS3) -> None:
    node.store_chain(FITS)
    node.store_chain(MORE)
    with nodes(bucket) as open_node:
        other = open_node()
        wait_for(lambda: other.cold().records == node.cold().records > 0)
        written = other.cold().records
        found = [*values(other, FITS), *values(other, MORE)]
        wanted = [*FITS.values, *MORE.values]
        assert all(value in (None, right) for value, right in zip(found, wanted, strict=True))
        assert sum(value is not None for value in found) == written >= node.statistics().evicted_keys


def test_only_a_record_that_the_device_lost_before_its_write_is_a_miss(
    node: Node, bucket: FaultyS3, tmp_path: Path
) -> None:
    """A read for the bucket finds a damaged record. Its neighbours must still be written to the bucket."""
    node.store_chain(FITS)
    cool(node)
    lost = 5
    name, value, *_ = FITS.records[lost]
    path = tmp_path / "device"
    data = bytearray(path.read_bytes())
    places = [place for place in range(0, len(data), 512) if data[place : place + 512] == value[-1024:-512]]
    begin = data.find(value)
    assert begin >= 0 and places, "the record must be contiguous on the device"
    with path.open("r+b") as file:
        file.seek(begin + len(value) // 2)
        file.write(b"\xff" * 64)
    node.store_chain(MORE)
    found = values(node, FITS)
    assert found[lost] is None and node.peek(storage_key(name)) is None
    assert [each for place, each in enumerate(found) if place != lost] == [
        each for place, each in enumerate(FITS.values) if place != lost
    ]
    assert values(node, MORE) == MORE.values
    assert node.cold().missed_records <= 1

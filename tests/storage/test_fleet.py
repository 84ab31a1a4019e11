"""A node of a fleet: the partitions that it serves, by members that change."""

import os
import socket
from pathlib import Path

import pytest
from machine import wait_for
from storage_support import Start

from shadowserve.errors import ConfigurationError
from shadowserve.placement import PARTITIONS
from storage_kv.config import FleetConfig
from storage_kv.fleet import Fleet

NODES = ["a:1", "b:1", "c:1=2", "d:1"]


def test_each_partition_is_served_by_one_node_in_proportion_to_the_weights() -> None:
    fleets = [Fleet(FleetConfig(address=node.partition("=")[0], members=NODES)) for node in NODES]
    for partition in range(PARTITIONS):
        assert sum(fleet.serves(partition) for fleet in fleets) == 1
    assert [fleet.share for fleet in fleets] == pytest.approx([0.2, 0.2, 0.4, 0.2], abs=0.03)


def test_a_node_that_is_no_member_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(FleetConfig(address="e:1", members=NODES))
    assert fleet.nodes == 0 and not any(fleet.serves(partition) for partition in range(PARTITIONS))
    assert "not_a_member address=e:1" in caplog.text
    with pytest.raises(ConfigurationError, match="No such file"):
        Fleet(FleetConfig(address="a:1", members="file:/does/not/exist"))


async def test_a_node_counts_itself_until_its_name_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new node is not in DNS at once."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("192.0.2.1", 6380))])
    fleet = Fleet(FleetConfig(address="192.0.2.2:6380", members="dns:storage.test:6380"))
    await fleet.start()
    assert fleet.nodes == 2 and fleet.share == pytest.approx(0.5, abs=0.05)
    await fleet.stop()


def test_a_running_node_follows_its_file_of_members(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "members"
    file.write_text("a:1\nb:1\n")
    server = start("--metrics-port", "0", "--fleet", f"{{address: 'a:1', members: 'file:{file}', ttl_s: 0.05}}")
    client = server.client()
    assert client.info()["fleet_nodes"] == "2"
    os.replace(_written(tmp_path / "new", "a:1\nb:1\nc:1\n"), file)
    wait_for(lambda: client.info()["fleet_nodes"] == "3")
    os.replace(_written(tmp_path / "new", ""), file)
    wait_for(lambda: int(client.info()["fleet_refused"]) > 1)
    assert client.info()["fleet_nodes"] == "3", "an empty list changes nothing"
    assert sum("members_refused" in line for line in server.log) == 1
    assert 0.2 < server.samples()["shadowserve_storage_fleet_share_ratio"] < 0.5


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path

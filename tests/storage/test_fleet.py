"""A node of a fleet: the partitions that it serves, by members that change."""

import os
from pathlib import Path

import pytest
from machine import wait_for
from storage_support import Start

from shadowserve.errors import ConfigurationError
from shadowserve.placement import PARTITIONS
from storage_kv.config import FleetConfig
from storage_kv.fleet import Fleet

NODES = ["a:1", "b:1", "c:1=2", "d:1"]


def test_each_partition_is_served_by_two_nodes_in_proportion_to_their_weights() -> None:
    fleets = [Fleet(FleetConfig(address=node.partition("=")[0], members=NODES)) for node in NODES]
    for partition in range(PARTITIONS):
        assert sum(fleet.serves(partition) for fleet in fleets) == 2
    assert [fleet.share for fleet in fleets] == pytest.approx([0.2, 0.2, 0.4, 0.2], abs=0.03)
    assert sum(fleet.share for fleet in fleets) == pytest.approx(1.0)


def test_a_node_that_is_no_member_serves_everything(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(FleetConfig(address="e:1", members=NODES))
    assert all(fleet.serves(partition) for partition in range(PARTITIONS))
    assert "not_a_member address=e:1" in caplog.text
    with pytest.raises(ConfigurationError, match="No such file"):
        Fleet(FleetConfig(address="a:1", members="file:/does/not/exist"))


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

"""Configurations of the data plane: refusals name the key, and stages share the cores."""

import os
from typing import Any

import pytest

from dpu_dataplane.config import DataPlaneConfig
from shadowserve.errors import ConfigurationError

TLS = {"storage_tls_ca": "ca.crt"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"listen": "0.0.0.0:0"}, "listen.*tls_client_ca.*allow_remote"),
        ({"listen": "0.0.0.0:1", "tls_cert": "a", "tls_key": "b"}, "listen.*tls_client_ca.*allow_remote"),
        ({"tls_cert": "a"}, "tls_cert is given without tls_key"),
        ({"tls_key": "a"}, "tls_key is given without tls_cert"),
        ({"tls_client_ca": "a"}, "tls_client_ca is given without tls_cert"),
        ({"codec": "zip"}, "codec.*zip"),
        ({"decompression_buffer_bytes": "17 parsecs"}, "decompression_buffer_bytes"),
        ({"net_cores": [9999], "connections": 1}, "net_cores"),
        ({"net_cores": [-1]}, "connections"),
        ({"cores": [4095]}, "cores.*4095"),
        ({"cores": []}, "cores.*empty"),
        ({"storage_nodes": ["a:1", "a:1"]}, "given twice"),
        ({"storage_nodes": ["a:0"]}, "port 0"),
        ({"storage_nodes": [f"a:{number}" for number in range(1, 258)]}, "256"),
        ({"storage_nodes": ["a:1"], "storage_cluster": ["b:1"]}, "use one of them"),
        ({"storage_nodes": ["a:1"], "storage_server_name": "a", **TLS}, "one name"),
        ({"storage_cluster": ["a:1"], "storage_server_name": "a", **TLS}, "certificates must hold"),
        ({"storage_cluster_replicas": True}, "no replicas"),
        ({"storage_cluster": ["127.0.0.1"]}, "host:port"),
        ({"storage_tls_cert": "a", **TLS}, "storage_tls_cert is given without storage_tls_key"),
        ({"storage_tls_cert": "a", "storage_tls_key": "b"}, "needs storage_tls_ca"),
        ({"storage_server_name": "storage"}, "needs storage_tls_ca"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_unusable_configuration_names_the_key(values: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigurationError, ValueError), match=f"(?s){words}"):
        DataPlaneConfig.model_validate(values).stage_cores()


def test_hosts_with_a_certificate_may_be_remote() -> None:
    flags = {"listen": "0.0.0.0:1", "tls_cert": "a", "tls_key": "b", "tls_client_ca": "c"}
    assert DataPlaneConfig.load(flags=flags, environment={}).allow_remote is False


def test_no_metrics_port_can_be_written_as_its_default_is_shown() -> None:
    assert DataPlaneConfig(metrics_port=DataPlaneConfig.default_text("metrics_port")).metrics_port is None


def test_stages_divide_the_cores_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    stages = DataPlaneConfig(cores=list(range(16, 32))).stage_cores()
    assert set(stages["net"]) == {16, 17}
    assert stages["decompress"] == list(range(18, 32))
    assert all(core in range(16, 32) for cores in stages.values() for core in cores)
    with pytest.raises(ConfigurationError, match="decompress_cores: core 3 is not"):
        DataPlaneConfig(cores=[16, 17], decompress_cores=[3]).stage_cores()


def test_on_few_cores_only_network_threads_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5})
    stages = DataPlaneConfig(connections=3).stage_cores()
    assert stages["net"] == [4, 5, 4]
    assert stages["decompress"] == stages["store"] == [-1, -1]

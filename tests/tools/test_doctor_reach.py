"""``shadowserve doctor`` identifies storage nodes, data planes and other servers by their own protocols."""

import contextlib
import dataclasses
import http.server
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from machine import PATIENT, free_port, http_server

from host_control.config import HostConfig
from shadowserve import __version__
from shadowserve.calibration import PRESETS, Calibration
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import ModelIdentity
from shadowserve.proto.convert import engine_message
from shadowserve_tools import listener, main
from shadowserve_tools.doctor.connector import VLLM_KEYS
from shadowserve_tools.listener import identify
from shadowserve_tools.processes import Child, start_data_plane, start_redis, start_storage

SMALL = ["--decompression-buffer-bytes", "8 MiB", "--store-buffer-bytes", "8 MiB", *PATIENT]
ENGINE = {"kv_connector": "ShadowServeConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
NOWHERE = ("--storage", "127.0.0.1:1", "--data-plane", "127.0.0.1:1")
Found = dict[str, tuple[str, str, str]]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with start_storage(tmp_path_factory.mktemp("storage")) as child:
        yield child


@pytest.fixture(scope="module")
def plane(storage: Child, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with start_data_plane(tmp_path_factory.mktemp("plane"), storage.address, *SMALL) as child:
        yield child


def doctor(*arguments: str) -> Found:
    done = CliRunner().invoke(main, ["doctor", "--json", *arguments])
    findings = json.loads(done.output)["findings"]
    assert done.exit_code == any(each["state"] == "failed" for each in findings)
    return {each["what"]: (each["state"], each["found"], each["remedy"]) for each in findings}


def on_host(storage: str, plane: str, **keys: Any) -> Found:
    engine = ENGINE | {"kv_connector_extra_config": {"data_plane": plane} | keys}
    return doctor("--storage", storage, "--kv-transfer-config", json.dumps(engine))


def test_findings_as_json_have_a_state_and_a_remedy_where_it_is_not_ok() -> None:
    report = json.loads(CliRunner().invoke(main, ["doctor", "--json", *NOWHERE]).output)
    assert report["version"] == __version__
    assert len({finding["what"] for finding in report["findings"]}) == len(report["findings"])
    for finding in report["findings"]:
        assert set(finding) == {"what", "state", "found", "remedy"}
        assert finding["state"] in ("ok", "warning", "failed")
        assert finding["found"]
        assert finding["remedy"] or finding["state"] == "ok"
    found = {finding["what"] for finding in report["findings"]}
    assert {"Python", "system", "C core", "shared memory", "storage server", "data plane"} <= found
    assert {"codec none", "codec deflate", "codec lz4", "codec zstd", "codec kvrans"} <= found


def test_an_error_in_a_check_is_a_failed_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no shared memory here")

    monkeypatch.setattr("shutil.disk_usage", broken)
    state, found, _ = doctor(*NOWHERE)["shared_memory"]
    assert state == "failed" and "no shared memory here" in found


# ---- Listening servers -----------------------------------------------------------------------------------------------


def test_running_programs_are_reported_with_their_release(storage: Child, plane: Child) -> None:
    found = on_host(storage.address, plane.address)
    assert found["storage server"][:2] == ("ok", f"ShadowServe {__version__} answers on {storage.address}")
    assert found["data plane"][0] == "ok" and f"ShadowServe {__version__}, backend" in found["data plane"][1]
    assert found["kv-transfer-config"][0] == "ok" and plane.address in found["kv-transfer-config"][1]


def test_a_host_whose_data_plane_has_tiers_alone_is_not_told_to_start_a_storage_node(tmp_path: Path) -> None:
    """Symptom: after the walk-through for one host, the doctor asked for a storage server on port 6380."""
    with start_data_plane(tmp_path, "", *SMALL, "--tiers", "{memory_budget_bytes: 16 MiB}") as plane:
        engine = ENGINE | {"kv_connector_extra_config": {"data_plane": plane.address}}
        found = doctor("--kv-transfer-config", json.dumps(engine))
    assert "storage server" not in found
    assert found["data plane's storage"] == ("ok", "tiers of 16 MiB, connected", "")


def test_swapped_addresses_are_two_failures_with_remedies(storage: Child, plane: Child) -> None:
    """Symptom: with the ports of storage node and data plane swapped, the doctor printed 'ok' twice."""
    found = on_host(plane.address, storage.address)
    state, what, remedy = found["storage server"]
    assert state == "failed" and "gRPC server, such as a data plane" in what
    assert "--storage" in remedy and "'data_plane' of the engine" in remedy
    state, what, remedy = found["data plane"]
    assert state == "failed" and "Redis' protocol, such as a storage node" in what
    assert "'data_plane' of the engine" in remedy and "'storage' of section 'dpu'" in remedy


def test_a_missing_or_wrong_password_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a storage server that refused all commands of the data plane was 'ok'."""
    with start_storage(tmp_path, environment={"SHADOWSERVE_STORAGE_PASSWORD": "right"}) as locked:
        file = tmp_path / "dpu.yaml"
        file.write_text(f"dpu: {{storage: '{locked.address}', listen: '127.0.0.1:1'}}")
        for password, state, told in (("", "failed", "NOAUTH"), ("wrong", "failed", "WRONGPASS"), ("right", "ok", "")):
            monkeypatch.setenv("SHADOWSERVE_DPU_STORAGE_PASSWORD", password)
            found = doctor("--config", str(file))["storage server"]
            assert found[0] == state and told in found[1], found
            assert state == "ok" or "SHADOWSERVE_DPU_STORAGE_PASSWORD" in found[2]


def test_redis_instead_of_a_storage_node_is_reported(tmp_path: Path) -> None:
    with start_redis(tmp_path) as redis:
        file = tmp_path / "file.yaml"
        port = redis.address.rpartition(":")[2]
        for text, state in (
            (f"dpu: {{storage: '{redis.address}', listen: '127.0.0.1:1'}}", "warning"),
            (f"dpu: {{storage_cluster: ['{redis.address}'], listen: '127.0.0.1:1'}}", "ok"),
            (f"storage: {{port: {port}}}", "failed"),
        ):
            file.write_text(text)
            found = doctor("--config", str(file))["storage server"]
            assert found[0] == state and "Redis " in found[1], found


def test_each_member_of_a_fleet_is_asked(storage: Child, tmp_path: Path) -> None:
    file, nodes = tmp_path / "dpu.yaml", tmp_path / "members"
    file.write_text(f"dpu: {{storage_nodes: 'file:{nodes}', listen: '127.0.0.1:1'}}")
    found = doctor("--config", str(file))["storage nodes"]
    assert found[0] == "failed" and "No such file" in found[1] and "storage_nodes" in found[2]
    nodes.write_text(f"{storage.address}=2\nlocalhost:{storage.address.rpartition(':')[2]}\n")
    states = {what: state for what, (state, *_) in doctor("--config", str(file)).items()}
    assert states[f"storage node {storage.address}"] == "ok", states


def test_an_http_server_and_a_silent_one_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quiet(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """No output: the test also reads standard error."""

    with http_server(Quiet) as address:
        found = on_host(address, address)
    assert found["storage server"][0] == found["data plane"][0] == "failed"
    assert "an HTTP server" in found["storage server"][1] and "an HTTP server" in found["data plane"][1]
    monkeypatch.setattr(listener, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert identify(f"127.0.0.1:{silent.getsockname()[1]}").protocol == "silent"


@pytest.mark.parametrize(
    ("address", "command"),
    [
        ("127.0.0.1:1", "shadowserve storage --port 1"),
        ("nowhere", "give the address as HOST:PORT"),
        ("127.0.0.1:many", "give the address as HOST:PORT"),
        (":6380", "give the address as HOST:PORT"),
    ],
)
def test_a_stopped_program_is_a_warning_with_the_command_that_starts_it(address: str, command: str) -> None:
    state, _, remedy = doctor("--storage", address)["storage server"]
    assert (state, remedy) == ("warning", command)


# ---- Configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "role"),
    [(("storage",), "storage"), (("dpu",), "data-plane"), (("host",), "host"), (("dpu", "host"), "host")],
)
def test_the_role_follows_from_the_file(tmp_path: Path, sections: tuple[str, ...], role: str) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("\n".join(f"{section}: {{}}" for section in sections))
    report = json.loads(CliRunner().invoke(main, ["doctor", "--json", "--config", str(file)]).output)
    assert report["role"] == role


def test_addresses_come_from_the_data_planes_configuration(tmp_path: Path) -> None:
    """Symptom: 'doctor --config dpu.yaml' ignored dpu.listen."""
    port = free_port()
    file = tmp_path / "dpu.yaml"
    file.write_text(f"dpu: {{listen: '0.0.0.0:{port}', allow_remote: true, tiers: {{devices: [/nowhere/pool]}}}}")
    for role in ("data-plane", "host"):
        found = doctor("--role", role, "--config", str(file))
        assert f"not reached on 127.0.0.1:{port}" in found["data plane"][1], found["data plane"]
        assert found["data plane"][2] == f"shadowserve dpu --config {file}"
        assert "storage server" not in found
    found = doctor("--config", str(file))
    assert found["device /nowhere/pool"][0] == "failed" and found["memory"][0] in ("ok", "warning")
    assert "image" not in found, "the doctor identified it as a BlueField"


def test_addresses_come_from_the_sections_of_all_programs(tmp_path: Path) -> None:
    """Symptom: in the host's role, it tried the default port of storage, and the remedy contained another file."""
    storage, plane = (f"127.0.0.1:{free_port()}" for _ in range(2))
    file = tmp_path / "all.yaml"
    sections = {"host": {"data_plane": plane}, "dpu": {"listen": plane, "storage": storage}}
    file.write_text(json.dumps(sections | {"storage": {"port": int(storage.rpartition(":")[2])}}))
    for role in ("host", "data-plane", "storage"):
        found = doctor("--role", role, "--config", str(file))
        assert found["storage server"][::2] == ("warning", f"shadowserve storage --config {file}")
        assert storage in found["storage server"][1]
        if role != "storage":
            assert found["data plane"][::2] == ("warning", f"shadowserve dpu --config {file}")
            assert plane in found["data plane"][1]


def test_a_data_plane_is_proposed_at_the_hosts_address_and_each_node_of_a_cluster_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("host: {data_plane: '127.0.0.1:1'}\n")
    assert doctor("--config", str(file))["data plane"][2] == "shadowserve dpu --listen 127.0.0.1:1"
    file.write_text("dpu: {storage_cluster: ['127.0.0.1:1', '127.0.0.1:2']}\n")
    found = doctor("--config", str(file))
    nodes = {what: remedy for what, (_, _, remedy) in found.items() if what.startswith("storage")}
    assert nodes.keys() == {"storage node 127.0.0.1:1", "storage node 127.0.0.1:2"}
    for remedy in nodes.values():  # symptom: it said to start our own storage node there
        assert "Redis or Valkey cluster" in remedy


def test_a_file_of_another_program_is_a_failure(tmp_path: Path) -> None:
    """Symptom: 'doctor --role storage --config emulated.yaml' found 0 faults."""
    (file := tmp_path / "dpu.yaml").write_text("dpu: {}")
    state, found, _ = doctor("--role", "storage", "--config", str(file))["configuration"]
    assert state == "failed" and "is for 'shadowserve dpu'" in found


@pytest.mark.parametrize("mutual", [False, True])
def test_tls_is_used_if_configured(tmp_path: Path, certificates: Path, mutual: bool) -> None:
    server = {name: certificates / f"server.{end}" for name, end in (("tls_cert", "crt"), ("tls_key", "key"))}
    flags = [word for name, path in server.items() for word in (f"--{name.replace('_', '-')}", str(path))]
    authority = ["--tls-client-ca", str(certificates / "ca.crt")]
    trusted = f"storage_tls_ca: {certificates / 'ca.crt'}"
    own = f"storage_tls_cert: {certificates / 'client.crt'}, storage_tls_key: {certificates / 'client.key'}"
    given = {key: str(path) for key, path in server.items()} | {"tls_client_ca": authority[1]}
    with start_storage(tmp_path, *flags, *(authority if mutual else [])) as node:
        file = tmp_path / "dpu.yaml"
        cases = [
            ("", "failed", "speaks TLS"),
            (trusted, "failed" if mutual else "ok", "on "),
            (f"{trusted}, {own}", "ok", ""),
        ]
        for keys, state, told in cases:
            file.write_text(f"dpu: {{storage: '{node.address}', listen: '127.0.0.1:1', {keys}}}")
            found = doctor("--config", str(file))["storage server"]
            assert found[0] == state and told in found[1], found
        file.write_text(json.dumps({"storage": {"port": int(node.address.rpartition(":")[2])} | given}))
        assert doctor("--config", str(file))["storage server"][0] == "ok"
    with start_data_plane(tmp_path, "127.0.0.1:1", *SMALL, *flags, *authority) as plane:
        mine = {"tls_ca": "ca.crt", "tls_cert": "client.crt", "tls_key": "client.key"}
        keys = {key: str(certificates / name) for key, name in mine.items()}
        assert on_host("127.0.0.1:1", plane.address, **keys)["data plane"][0] == "ok"
        state, found, remedy = on_host("127.0.0.1:1", plane.address)["data plane"]
        assert state == "failed" and "set tls_ca" in found
        # Symptom: the advice was to install the same release on both sides.
        assert "certificates" in remedy and "release" not in remedy
        file.write_text(json.dumps({"dpu": {"listen": plane.address} | given}))
        assert doctor("--config", str(file))["data plane"][0] == "ok"


# ---- --kv-transfer-config --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "no JSON"),
        ("[]", "no JSON object"),
        ({"kv_connector": "ShadowServConnector"}, 'it is "ShadowServeConnector"'),
        ({"kv_role": "both"}, "kv_both, kv_producer, kv_consumer"),
        ({"kv_rol": "kv_both"}, 'did you mean "kv_role"?'),
        ({"kv_connector_extra_config": {"quantiser": "binned"}}, "did you mean 'quantizer'"),
        ({"kv_connector_extra_config": []}, "no JSON object"),
        ({"kv_connector_extra_config": {"data_plane": "redis://a"}}, "is a URL"),
        ({"kv_connector": "MultiConnector"}, "connectors"),
        ({"kv_connector": "OffloadingConnector"}, "secondary_tiers"),
    ],
    ids=str,
)
def test_an_invalid_transfer_config_is_a_failure(text: Any, told: str) -> None:
    text = text if isinstance(text, str) else json.dumps(ENGINE | text)
    state, found, _ = doctor("--kv-transfer-config", text)["kv-transfer-config"]
    assert state == "failed" and told in found


@pytest.mark.parametrize(
    "transfer",
    [
        {"kv_connector_extra_config": {"data_plane": "127.0.0.1:1"}},
        {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [
            {"kv_connector": "Other"}, ENGINE | {"kv_connector_extra_config": {"data_plane": "127.0.0.1:1"}}]}},
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"secondary_tiers": [
            {"type": "ShadowServeTier", "module_path": "host_control.vllm.tier", "data_plane": "127.0.0.1:1"}]}},
    ],
    ids=lambda transfer: transfer.get("kv_connector", ""),
)  # fmt: skip
def test_the_data_planes_address_comes_from_the_transfer_config(transfer: dict[str, Any]) -> None:
    found = doctor("--kv-transfer-config", json.dumps(ENGINE | transfer))
    assert found["kv-transfer-config"][0] == "ok" and "not reached on 127.0.0.1:1" in found["data plane"][1]


def test_a_load_failure_policy_that_fails_requests_is_a_warning() -> None:
    found = doctor("--kv-transfer-config", json.dumps(ENGINE | {"kv_load_failure_policy": "fail"}))
    assert found["load failures"][0] == "warning" and "recompute" in found["load failures"][2]


def test_a_calibration_is_read(tmp_path: Path) -> None:
    file, shape = tmp_path / "model.calibration", (2, 2, 4, 8)
    extra = {"data_plane": "127.0.0.1:1", "quantizer": "small", "calibration": str(file)}
    arguments = ("--kv-transfer-config", json.dumps(ENGINE | {"kv_connector_extra_config": extra}))
    state, found, remedy = doctor(*arguments)["calibration"]
    assert (state, "No such file" in found, "shadowserve calibrate" in remedy) == ("failed", True, True)
    steps, centres = np.ones(shape, np.float32), np.zeros(shape, np.float32)
    Calibration("a model", "Llama", "", dict.fromkeys(PRESETS, steps), centres, np.empty(0)).write(file)
    state, found, _ = doctor(*arguments)["calibration"]
    assert state == "ok" and "a model, 2 layers, 4 KV heads of 8" in found


def test_the_listed_vllm_keys_are_complete() -> None:
    config = pytest.importorskip("vllm.config.kv_transfer").KVTransferConfig
    assert tuple(each.name for each in dataclasses.fields(config)) == VLLM_KEYS


# ---- Engines ---------------------------------------------------------------------------------------------------------


def test_engines_of_one_model_that_do_not_share_kv_are_a_warning(storage: Child, tmp_path: Path) -> None:
    """Symptom: two engines with different chunk_tokens shared nothing, and the doctor only checked the port."""
    layout = ChunkLayout(
        namespace=b"n" * 32, dtype=DType.BFLOAT16, layers=2, kinds=2, vector_length=64, tokens=256,
        quantizer=Quantizer.LOSSLESS,
    )  # fmt: skip
    model = ModelIdentity(model="a model", dtype="bfloat16")
    with start_data_plane(tmp_path, storage.address, *SMALL) as plane, contextlib.ExitStack() as clients:

        def engines(**keys: Any) -> tuple[str, str, str]:
            return on_host(storage.address, plane.address, **keys)["engines"]

        for number, identity in enumerate((model, model, dataclasses.replace(model, chunk_tokens=512))):
            client = HostConfig(data_plane=plane.address).client(0, engine_message(identity, layout, paged=False))
            clients.enter_context(contextlib.closing(client)).connect(60.0, layout)
            if number == 0:
                for keys in ({"chunk_tokens": 512}, {"quantizer": "binned"}):
                    state, found, _ = engines(**keys)
                    assert state == "warning" and "none has this engine's chunks" in found
            state, found, remedy = engines()
            assert state == ("ok" if number < 2 else "warning"), found
        assert "256 tokens" in found and "512 tokens" in found
        # Each of these keys keeps records of engines apart.
        assert {"chunk_tokens", "pages", "calibration", "scale_tokens"} <= set(re.findall(r"\w+", remedy))

"""The Helm chart and deploy/examples: schemas, refused values, and the programs with what the chart renders.

scripts/test-chart installs the tools and runs this; 'make test' leaves it out (conftest.py).
"""

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from machine import NEVER_S, WAIT_MAX_S, free_port, wait_for

from dpu_dataplane.config import DataPlaneConfig
from host_control.config import HostConfig
from shadowserve.config import Section
from shadowserve.sizes import ByteSize
from shadowserve_tools.processes import started
from shadowserve_tools.programs.dpu import dpu
from shadowserve_tools.programs.storage import storage
from storage_kv.config import StorageConfig

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "deploy" / "chart" / "shadowserve"
EXAMPLES = REPOSITORY / "deploy" / "examples"
VALUES = sorted(CHART.glob("ci/*-values.yaml"))
SMALLEST = CHART / "ci" / "one-node-values.yaml"
RELEASES = ("1.29", "1.37")  # the chart's kubeVersion, and the newest
TOOLS = Path(os.environ["CHART_TOOLS"])
each_values_file = pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem.removesuffix("-values"))
Document = dict[str, Any]


def run(tool: str, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, timeout=NEVER_S, check=False)


@functools.cache
def rendered(values: Path, *options: str) -> str:
    done = run("helm", "template", "ss", CHART, "--namespace", "kv", "--values", values, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document]


def pods(found: list[Document]) -> list[Document]:
    return [document["spec"]["template"] for document in found if "template" in document.get("spec", {})]


def containers(found: list[Document]) -> Iterator[Document]:
    for pod in pods(found):
        yield from pod["spec"].get("initContainers", []) + pod["spec"]["containers"]


def test_there_are_five_value_files_and_the_linter_takes_all() -> None:
    assert len(VALUES) == 5
    for values in VALUES:
        done = run("helm", "lint", "--strict", CHART, "--values", values)
        assert done.returncode == 0, done.stdout + done.stderr


@each_values_file
def test_resources_are_valid_in_two_releases_of_kubernetes(values: Path, tmp_path: Path) -> None:
    path = tmp_path / "rendered.yaml"
    path.write_text(rendered(values))
    for release in RELEASES:
        done = run("kubernetes-validate", "--strict", "-k", release, path)
        assert done.returncode == 0, done.stdout + done.stderr
        said = done.stdout + done.stderr
        own = [document for document in documents(rendered(values)) if "monitoring" not in document["apiVersion"]]
        assert said.count(" passed for resource ") == len(own)  # none without a schema
    path.write_text(rendered(values).replace("serviceAccountName:", "serviceAccountNames:"))
    assert run("kubernetes-validate", "--strict", path).returncode == 1


@each_values_file
def test_resources_of_the_prometheus_operator_are_valid(values: Path, tmp_path: Path) -> None:
    found = [document for document in documents(rendered(values)) if "monitoring" in document["apiVersion"]]
    for index, document in enumerate(found):
        path = tmp_path / f"{index}.json"
        path.write_text(json.dumps(document))
        done = run("check-jsonschema", "--schemafile", Path(__file__).with_name("monitoring.schema.json"), path)
        assert done.returncode == 0, done.stdout
    kinds = [document["kind"] for document in found]
    asked = yaml.safe_load(values.read_text()).get("metrics", {})
    assert ("ServiceMonitor" in kinds) == ("serviceMonitor" in asked)
    rules = [document["spec"] for document in found if document["kind"] == "PrometheusRule"]
    original = yaml.safe_load((REPOSITORY / "configs" / "prometheus" / "shadowserve.rules.yaml").read_text())
    assert rules == [original] * ("prometheusRule" in asked)


def test_monitors_select_a_service_that_has_the_port_and_the_job_that_alerts_name() -> None:
    options = ("--set", "engine.enabled=true")
    found = documents(rendered(CHART / "ci" / "shared-values.yaml", *options))
    alerts = (REPOSITORY / "configs" / "prometheus" / "shadowserve.rules.yaml").read_text()
    jobs = set()
    for monitor in (document for document in found if document["kind"] == "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = (d for d in found if d["kind"] == "Service" and wanted <= d["metadata"]["labels"].items())
        (endpoint,) = monitor["spec"]["endpoints"]
        (port,) = (port for port in service["spec"]["ports"] if port["name"] == endpoint["port"])
        selector = service["spec"]["selector"].items()
        chosen = [pod["spec"] for pod in pods(found) if selector <= pod["metadata"]["labels"].items()]
        ports = [each for spec in chosen for container in spec["containers"] for each in container["ports"]]
        assert any(port["targetPort"] in (each["name"], each["containerPort"]) for each in ports)
        jobs.add(endpoint["relabelings"][0]["replacement"])
    assert set(re.findall(r'job="([^"]+)"', alerts)) | {"vllm"} == jobs
    dashboards = {name for d in found if d["kind"] == "ConfigMap" for name in d["data"] if name.endswith(".json")}
    assert dashboards == {path.name for path in (REPOSITORY / "configs" / "grafana").glob("*.json")}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("storage.replica=2", "'replica'"),
        ("storage.replicas=two", "/storage/replicas"),
        ("storage.config.memory_budget=1GiB", "'memory_budget'"),
        ("storage.config.host=127.0.0.1", "'host'"),  # the chart's own
        ("storage.config.tenants.a.bytes=1GiB", "'bytes'"),
        ("storage.config.s3.buckets=kv", "'buckets'"),
        ("storage.persistence.size=100GiB", "/storage/persistence/size"),
        ("storage.persistence.volumeMode=File", "/storage/persistence/volumeMode"),
        ("storage.livenessProbe.enabled=1", "/storage/livenessProbe/enabled"),
        ("dataPlane.mode=deployment", "/dataPlane/mode"),
        ("dataPlane.config.hosts_max=0", "/dataPlane/config/hosts_max"),
        ("dataPlane.config.tiers.memory_budget_bytes=much", "/dataPlane/config/tiers/memory_budget_bytes"),
        ("engine.config.quantiser=binned", "'quantiser'"),
        ("engine.shmSize=4GB", "/engine/shmSize"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("metrics.serviceMonitor.enable=true", "'enable'"),
        ("networkPolicies.enabled=true", "'networkPolicies'"),
        # Values that do not work together
        ("image.registry=", "image.registry"),
        ("auth.existingSecret=", "auth.existingSecret"),
        ("auth.passwordKey=", "auth.passwordKey"),
        ("auth.usersKey=users.acl", "auth.username"),
        ("auth.username=team-a", "auth.usersKey"),
        ("tls.enabled=true", "tls.existingSecret"),
        ("tls.requireClientCertificate=true", "tls.clientExistingSecret"),
        ("tls.usersFromCertificates=true", "tls.requireClientCertificate"),
        ("auth.passwordKey=,auth.usersKey=users.acl", "auth.passwordKey"),
        (
            "tls.enabled=true,tls.existingSecret=a,tls.clientExistingSecret=b,tls.requireClientCertificate=true,"
            "tls.usersFromCertificates=true",
            "auth.usersKey",
        ),
        ("dataPlane.hostNetwork=true", "networkPolicy.clients"),
        ("dataPlane.config.tiers.devices[0].path=/var/lib/shadowserve/t", "dataPlane.hostPath.disk"),
        ("storage.enabled=false", "neither storage nor tiers"),
        ("dataPlane.enabled=false,engine.enabled=true", "engine.config.data_plane"),
        ("metrics.serviceMonitor.enabled=true", "networkPolicy.monitoring"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(given: str, key: str) -> None:
    done = run("helm", "template", "ss", CHART, "--values", SMALLEST, "--set", given)
    assert done.returncode != 0 and key in done.stderr.replace("found symbolic link", ""), done.stderr


def arguments_of(container: Document, files: dict[str, str], folder: Path) -> list[str]:
    """Return a program's arguments, with the configuration file in ``folder``."""
    arguments = list(container["args"])
    place = arguments.index("--config") + 1
    path = folder / Path(arguments[place]).name
    path.write_text(files[path.name])
    arguments[place] = str(path)
    return arguments


def files_of(found: list[Document]) -> dict[str, str]:
    return {name: text for d in found if d["kind"] == "ConfigMap" for name, text in d["data"].items()}


def read(command: click.Command, section: type[Section], container: Document, arguments: list[str]) -> Any:
    """Return the configuration that a program would have, from its command line, its environment and its file."""
    options = dict(command.make_context("test", arguments).params)
    environment = {each["name"]: each.get("value", "secret") for each in container["env"] or []}
    return section.load(options.pop("config"), options, environment)


def transfer_configuration(arguments: list[str]) -> HostConfig:
    given = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert given["kv_connector"] == "ShadowServeConnector" and given["kv_load_failure_policy"] == "recompute"
    return HostConfig.from_engine(given["kv_connector_extra_config"])


def memory_limit(container: Document) -> int:
    limit: str = container["resources"]["limits"]["memory"]
    return ByteSize.read(f"{limit}B")


@each_values_file
def test_the_programs_take_what_is_rendered_and_their_memory_suffices(values: Path, tmp_path: Path) -> None:
    found = documents(rendered(values))
    seen = set()
    for container in containers(found):
        match container["command"]:
            case ["shadowserve", "storage"]:
                arguments = arguments_of(container, files_of(found), tmp_path)
                config = read(storage, StorageConfig, container, arguments)
                budget = int(config.memory_budget_bytes) + config.clients_memory_bytes + (1 << 30)
                assert (config.host, config.metrics_port) == ("0.0.0.0", 9150)  # noqa: S104
                mounts = {each["mountPath"] for each in container["volumeMounts"]}
                devices = {each["devicePath"] for each in container.get("volumeDevices", [])}
                assert all(str(each.path.parent) in mounts or str(each.path) in devices for each in config.devices)
            case ["shadowserve", "dpu"]:
                arguments = arguments_of(container, files_of(found), tmp_path)
                config = read(dpu, DataPlaneConfig, container, arguments)
                budget = sum(config.memory_budgets().values()) + (1 << 30)
                assert container["resources"]["limits"] == container["resources"]["requests"]  # for cores of its own
                assert config.listen.startswith("unix:/run/shadowserve/") or config.tls_client_ca
            case ["vllm", "serve"]:
                host = transfer_configuration(container["args"])
                assert host.data_plane == "unix:/run/shadowserve/dpu.sock"
                budget = int(host.fetch_buffer_bytes) + int(host.store_buffer_bytes)
            case other:
                assert other == ["chown"]
                continue
        seen.add(container["command"][1])
        assert memory_limit(container) >= budget
    assert "dpu" in seen


@each_values_file
def test_a_pod_hides_service_links_and_shares_no_namespace_with_its_host(values: Path) -> None:
    for pod in pods(documents(rendered(values))):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False and spec["automountServiceAccountToken"] is False
        assert not spec.get("hostIPC") and not spec.get("hostPID")
        if "sidecar" in values.stem:
            assert not any("hostPath" in volume for volume in spec["volumes"])


def test_three_replicas_are_a_fleet_whose_members_are_those_of_the_service() -> None:
    found = documents(rendered(CHART / "ci" / "shared-values.yaml"))
    service = "ss-shadowserve-storage.kv.svc.cluster.local"
    assert yaml.safe_load(files_of(found)["dpu.yaml"])["dpu"]["storage_nodes"] == f"dns:{service}:6380"
    [node] = [each for each in containers(found) if each["name"] == "storage"]
    [fleet] = [each["value"] for each in node["env"] if each["name"] == "SHADOWSERVE_STORAGE_FLEET"]
    assert json.loads(fleet) == {"address": f"$(POD_NAME).{service}:6380", "members": f"dns:{service}:6380"}


def answer(port: int, path: str) -> tuple[int, str]:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as page:
        return page.status, page.read().decode()
    return 0, ""


def local(container: Document, files: dict[str, str], folder: Path, name: str) -> tuple[list[str], dict[str, int]]:
    """Return a container's command as it runs on this machine, and its free ports by that of the container."""
    ports = {each["containerPort"]: free_port() for each in container["ports"]}
    files = {
        key: text.replace("/etc/shadowserve", str(folder))
        .replace("/var/lib/shadowserve", str(folder))
        .replace("ss-shadowserve-storage-0.ss-shadowserve-storage.kv.svc.cluster.local", "localhost")
        for key, text in files.items()
    }
    arguments = [
        str(ports[int(each)]) if each.isdigit() else each.replace("/run/shadowserve", str(folder))
        for each in arguments_of(container, files, folder)
    ]
    return [sys.executable, "-m", "shadowserve_tools", name, *arguments], ports


def test_rendered_programs_talk_over_tls_and_their_probes_and_metrics_answer(tmp_path: Path) -> None:
    """As in a cluster: users from certificates, a file on a volume, probes and monitors at their paths and ports."""
    make = [sys.executable, REPOSITORY / "scripts" / "make-certificates", tmp_path / "tls", "--user", "team-a"]
    subprocess.run(make, check=True, capture_output=True, timeout=NEVER_S)
    for name in ("users", "disk-0"):
        (tmp_path / name).mkdir()
    (tmp_path / "users" / "users.acl").write_text("user team-a on ~* +@all -@admin tenant=team-a\n")
    for kind in ("crt", "key"):
        (tmp_path / "tls" / f"tls.{kind}").write_bytes((tmp_path / "tls" / f"server.{kind}").read_bytes())
    options = ["storage.replicas=1", "storage.config.s3=null", "storage.persistence.count=1"]
    options += ["storage.persistence.fileSize=64 MiB", "storage.config.memory_budget_bytes=32 MiB"]
    found = documents(rendered(CHART / "ci" / "shared-values.yaml", "--set", ",".join(options)))
    by_name = {container["name"]: container for container in containers(found)}
    files = files_of(found)
    client = {f"tls/tls.{kind}": f"tls/team-a.{kind}" for kind in ("crt", "key")}
    for given, own in client.items():
        files["dpu.yaml"] = files["dpu.yaml"].replace(given, own)
    server, server_ports = local(by_name["storage"], files, tmp_path, "storage")
    files["dpu.yaml"] = files["dpu.yaml"].replace(":6380", f":{server_ports[6380]}")
    plane, plane_ports = local(by_name["data-plane"], files, tmp_path, "dpu")
    with (
        started("storage", server, tmp_path, timeout_s=WAIT_MAX_S),
        started("dpu", plane, tmp_path, timeout_s=WAIT_MAX_S),
    ):
        wait_for(lambda: "ok storage: connected" in answer(plane_ports[9151], "/readyz")[1])
        for container, ports in ((by_name["storage"], server_ports), (by_name["data-plane"], plane_ports)):
            names = {each["name"]: each["containerPort"] for each in container["ports"]}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                asked = container[probe]["httpGet"]
                assert answer(ports[names[asked["port"]]], asked["path"])[0] == 200
        for ports, known in ((server_ports, "shadowserve_storage_recovered 1"), (plane_ports, "storage_up 1")):
            assert known in answer(max(ports.items())[1], "/metrics")[1]
    assert (tmp_path / "disk-0" / "pool").stat().st_size == 64 << 20


LLM_D = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: guide-ROLE}
spec:
  selector: {matchLabels: {llm-d.ai/role: ROLE}}
  template:
    metadata: {labels: {llm-d.ai/role: ROLE}}
    spec:
      initContainers:
        - {name: routing-proxy, image: sidecar, args: [--kv-connector=nixlv2], restartPolicy: Always}
      containers:
        - name: modelserver
          image: docker.io/vllm/vllm-openai:v0
          volumeMounts: [{name: shm, mountPath: /dev/shm}]
      volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 20Gi}}]
"""
"""The parts of llm-d's 'base' (guides/pd-disaggregation, August 2026) that the overlay changes."""


def check_strictly(document: Document, path: Path) -> None:
    path.write_text(json.dumps(document))
    for release in RELEASES:
        done = run("kubernetes-validate", "--strict", "-k", release, path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_overlay_for_llm_d_attaches_both_engines_to_the_daemonset(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "llm-d", tmp_path / "shadowserve")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "kustomization.yaml").write_text("resources: [prefill.yaml, decode.yaml]\n")
    for role in ("prefill", "decode"):
        (tmp_path / "base" / f"{role}.yaml").write_text(LLM_D.replace("ROLE", role))
    done = run("kubectl", "kustomize", tmp_path / "shadowserve")
    assert done.returncode == 0, done.stderr
    (of_chart,) = (
        each for each in pods(documents(rendered(SMALLEST))) if each["spec"]["containers"][0]["name"][0] == "d"
    )
    folders = {each["hostPath"]["path"] for each in of_chart["spec"]["volumes"] if "hostPath" in each}
    roles = []
    for document in documents(done.stdout):
        check_strictly(document, tmp_path / "deployment.json")
        spec = document["spec"]["template"]["spec"]
        (engine,) = spec["containers"]
        config = transfer_configuration(engine["args"])
        assert config.data_plane == "unix:/run/shadowserve/dpu.sock" and "shadowserve-engine" in engine["image"]
        assert {each["mountPath"] for each in engine["volumeMounts"]} == {"/run/shadowserve", "/dev/shm"}  # noqa: S108
        assert {each["hostPath"]["path"] for each in spec["volumes"] if "emptyDir" not in each} == folders
        assert spec["securityContext"]["runAsUser"] == of_chart["spec"]["securityContext"]["runAsUser"]
        roles.append(config.pd_role)
        if config.pd_role == "decode":
            (proxy,) = (each for each in spec["initContainers"] if each["name"] == "routing-proxy")
            assert {"--kv-connector=shared-storage", "--vllm-port=8200"} <= {*proxy["args"]}
            assert "--port=8200" in engine["args"]
    assert sorted(roles) == ["decode", "prefill"]


def test_the_example_for_kserve_runs_the_charts_configuration_in_a_sidecar(tmp_path: Path) -> None:
    options = ("--set", "dataPlane.mode=sidecar,fullnameOverride=shadowserve,auth.existingSecret=shadowserve-auth")
    chart = documents(rendered(SMALLEST, *options))
    (service,) = documents((EXAMPLES / "kserve" / "llminferenceservice.yaml").read_text())
    spec = service["spec"]["template"]
    check_strictly({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, tmp_path / "pod.json")
    (plane,), (engine,) = spec["initContainers"], spec["containers"]
    names = {document["metadata"]["name"] for document in chart if document["kind"] == "ConfigMap"}
    assert {each["configMap"]["name"] for each in spec["volumes"] if "configMap" in each} <= names
    config = read(dpu, DataPlaneConfig, plane, arguments_of(plane, files_of(chart), tmp_path))
    assert plane["startupProbe"]["httpGet"]["path"] == "/healthz" and config.metrics_port == 9151
    (extra,) = (each["value"] for each in engine["env"] if each["name"] == "VLLM_ADDITIONAL_ARGS")
    host = transfer_configuration(shlex.split(extra))
    assert host.data_plane == config.listen
    (shm,) = (each["emptyDir"]["sizeLimit"] for each in spec["volumes"] if each["name"] == "dshm")
    assert ByteSize.read(f"{shm}B") > int(host.fetch_buffer_bytes) + int(host.store_buffer_bytes)
    label = {"shadowserve/data-plane": "ss"}  # the release
    assert service["spec"]["labels"].keys() == label.keys()
    admitted = [each for each in chart if each["kind"] == "NetworkPolicy" and "ingress" in each["spec"]]
    assert any({"podSelector": {"matchLabels": label}} in each["spec"]["ingress"][0]["from"] for each in admitted)


EXCUSED = {
    "CKV_K8S_15": "tags are releases, which do not change: no pull at each start",
    "CKV_K8S_22": "engine: NVIDIA's CDI hook writes to the root file system",
    "CKV_K8S_25": "own-folders of the DaemonSet needs CHOWN: the kubelet creates hostPath folders as root's",
    "CKV_K8S_35": "the programs read passwords from the environment, so that they are in no file",
    "CKV_K8S_40": "user 6380 is that of the images",
    "CKV_K8S_43": "image.digest is the user's: the images are in their registry",
}
OF_THE_CARD = {
    "CKV_K8S_16": "a BlueField's devices need a privileged container",
    "CKV_K8S_19": "engines reach the card's own address",
    "CKV_K8S_20": "privileged containers have it",
}


@each_values_file
def test_security_findings_are_fixed_or_excused_by_name(values: Path, tmp_path: Path) -> None:
    path = tmp_path / "rendered.yaml"
    path.write_text(rendered(values))
    excused = EXCUSED | (OF_THE_CARD if "bluefield" in values.stem else {})
    done = run("checkov", "--framework", "kubernetes", "--skip-download", "--output", "json", "--file", path)
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 50
    found = {(each["check_id"], each["check_name"]) for each in report["results"]["failed_checks"]}
    assert not {each for each in found if each[0] not in excused}

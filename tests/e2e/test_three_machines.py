"""Host, DPU and storage node in three network namespaces, with TLS between host and DPU, and link failures.

    host 10.213.8.1 --- 10.213.8.2 DPU 10.213.9.1 --- 10.213.9.2 storage

Registered memory is shared memory of this machine; all other traffic uses the links.
"""

import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from machine import PATIENT

from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.peers.network import Namespace, join, run
from shadowserve_tools.processes import Child, start_data_plane, start_storage

HOST, DPU, DPU_INNER, STORAGE = "10.213.8.1", "10.213.8.2", "10.213.9.1", "10.213.9.2"
PROGRAM = Path(__file__).parent / "far_host.py"
SMALL = ("--decompression-buffer-bytes", "4MiB", "--store-buffer-bytes", "4MiB")


class FarHost:
    """far_host.py in the host's namespace."""

    def __init__(self, place: Namespace, configuration: Path, environment: dict[str, str]) -> None:
        with place.entered():
            self.process = subprocess.Popen(
                [sys.executable, PROGRAM, configuration], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, env=environment,
            )  # fmt: skip
        assert self.answer() == "ready"

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the host's process has ended"
        return json.loads(line)

    def begin(self, order: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"do": order} | arguments), file=self.process.stdin, flush=True)

    def do(self, order: str, **arguments: Any) -> Any:
        self.begin(order, **arguments)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Machines:
    """Three machines with a running data plane and storage node."""

    host: Namespace
    dpu: Namespace
    storage: Child
    data_plane: Child
    folder: Path
    environment: dict[str, str]

    @contextmanager
    def far_host(self, certificates: Path, **keys: Any) -> Iterator[FarHost]:
        files = {"tls_ca": "ca.crt", "tls_cert": "client.crt", "tls_key": "client.key"}
        section = {"data_plane": self.data_plane.address, "fetch_timeout_s": 60.0}
        section |= {key: str(certificates / name) for key, name in files.items()}
        configuration = self.folder / f"{secrets.token_hex(4)}.yaml"
        configuration.write_text(json.dumps({"host": section | keys}))
        with closing(FarHost(self.host, configuration, self.environment)) as host:
            yield host

    def link(self, state: str) -> None:
        """Set the link between host and DPU ``up`` or ``down``."""
        with self.dpu.entered():
            run("ip", "link", "set", "dpu", state)


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Namespace, Namespace, Namespace]]:
    with ExitStack() as stack:
        try:
            host, dpu, storage = (stack.enter_context(closing(Namespace())) for _ in range(3))
            join((host, "host", HOST), (dpu, "dpu", DPU))
            join((dpu, "dpu-inner", DPU_INNER), (storage, "storage", STORAGE))
        except ShadowServeError as error:
            pytest.skip(str(error))
        yield host, dpu, storage


@pytest.fixture(scope="module")
def dpu_certificates(make_certificates: Callable[..., Path]) -> Path:
    return make_certificates(DPU, "dpu.example")


@pytest.fixture(scope="module")
def machines(
    network: tuple[Namespace, Namespace, Namespace],
    dpu_certificates: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Machines]:
    host, dpu, store = network
    folder = tmp_path_factory.mktemp("machines")
    password = secrets.token_hex(16)
    flags = [f"--tls-{key}={dpu_certificates / name}" for key, name in
             (("cert", "server.crt"), ("key", "server.key"), ("client-ca", "ca.crt"))]  # fmt: skip
    with ExitStack() as stack:
        with store.entered():
            environment = {"SHADOWSERVE_STORAGE_PASSWORD": password}
            storage = stack.enter_context(start_storage(folder, "--host", STORAGE, environment=environment))
        with dpu.entered():
            environment = {"SHADOWSERVE_DPU_STORAGE_PASSWORD": password}
            flags += ["--listen", f"{DPU}:0", *PATIENT, *SMALL]
            plane = stack.enter_context(start_data_plane(folder, storage.address, *flags, environment=environment))
        yield Machines(host, dpu, storage, plane, folder, {"PYTHONPATH": str(request.config.rootpath)})


def test_a_host_stores_and_fetches_across_the_links(machines: Machines, dpu_certificates: Path) -> None:
    assert machines.data_plane.address.startswith(f"{DPU}:"), "the data plane listens on another machine's address"
    with machines.far_host(dpu_certificates) as host:
        assert host.do("connect", timeout=60) == {"backend": "software"}
        stored(host, [1, 2, 3])
        assert host.do("lookup", seeds=[1, 2, 3, 4]) == {"hits": [3]}
        answer = host.do("fetch", seeds=[1, 2, 3])
        assert (answer["chunks"], answer["reason"], answer["exact"]) == (3, "complete", True)


def test_a_host_with_an_unknown_certificate_is_refused(
    machines: Machines, dpu_certificates: Path, foreign: Path, tmp_path: Path
) -> None:
    with machines.far_host(foreign, tls_ca=str(dpu_certificates / "ca.crt")) as host:
        answer = host.do("connect", timeout=60)
        assert (
            answer["reason"] == "refused" and "TLS: the data plane rejects this host's certificate" in answer["detail"]
        )
        answer = host.do("fetch", seeds=[1])
        assert (answer["chunks"], answer["reason"]) == (0, "refused")
    assert "CERTIFICATE_VERIFY_FAILED" in machines.data_plane.log.read_text()


def test_a_link_failure_during_a_fetch_costs_its_deadline(machines: Machines, dpu_certificates: Path) -> None:
    with machines.far_host(dpu_certificates, fetch_timeout_s=3.0) as host:
        assert host.do("connect", timeout=60) == {"backend": "software"}
        stored(host, [5, 6])
        assert host.do("fetch", seeds=[5, 6])["exact"]
        # The fetch runs while the storage node is stopped.
        machines.storage.process.send_signal(signal.SIGSTOP)
        try:
            host.begin("fetch", seeds=[5, 6])
            time.sleep(1.0)
            machines.link("down")
            answer = host.answer()
        finally:
            machines.storage.process.send_signal(signal.SIGCONT)
        try:
            assert (answer["chunks"], answer["exact"]) == (0, True)
            assert answer["reason"] in ("deadline", "unreachable")
            answer = host.do("fetch", seeds=[5, 6])  # a miss, and not an error
            assert answer["chunks"] == 0 and answer["reason"] in ("deadline", "unreachable", "breaker_open"), answer
            assert answer["retired"] >= 1, "memory with a possible late write was kept"
        finally:
            machines.link("up")
        ends = time.monotonic() + 90
        while (answer := host.do("fetch", seeds=[5, 6]))["chunks"] != 2:
            assert time.monotonic() < ends, answer
            time.sleep(0.1)
        assert (answer["reason"], answer["exact"]) == ("complete", True)


def stored(host: FarHost, seeds: list[int]) -> None:
    """Store chunks, with retries."""
    ends = time.monotonic() + 60
    while host.do("lookup", seeds=seeds) != {"hits": [len(seeds)]}:
        assert time.monotonic() < ends
        host.do("store", seeds=seeds)

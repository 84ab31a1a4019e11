"""A bucket on loopback: Ceph's object gateway, in memory, if it is installed; otherwise the tests' own server."""

import contextlib
import http
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shadowserve.errors import ShadowServeError
from shadowserve.pool.cold.credentials import Credentials, signed_headers
from shadowserve.pool.cold.http import HttpClient
from shadowserve_tools.processes import free_port, started

_REPOSITORY: Final = Path(__file__).resolve().parents[3]
_SCRIPT: Final = _REPOSITORY / "scripts" / "ceph"
_PROGRAMS: Final = ("ceph-mon", "ceph-osd", "radosgw")
_START_S: Final = 300
_ANSWER_S: Final = 60
BUCKET: Final = "kv-test"
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "testaccess", "AWS_SECRET_ACCESS_KEY": "testsecret12345"}
"""Environment of the bucket's users."""
MISSING: Final = (
    next((f"{name} is not installed" for name in _PROGRAMS if shutil.which(name) is None), "")
    or ("" if _SCRIPT.exists() else "scripts/ceph is not here: this is no checkout")
)  # fmt: skip
"""Reason why Ceph's gateway cannot run here; empty if it can."""


@contextlib.contextmanager
def ceph_gateway(bucket: str) -> Iterator[str]:
    """Yield the endpoint of a gateway with an empty bucket."""
    if MISSING:
        raise ShadowServeError(f"{MISSING}: apt-get install --no-install-recommends ceph-mon ceph-osd radosgw")
    folder = Path(tempfile.mkdtemp(prefix="ceph-")) / "node"  # paths of sockets are short
    port = free_port()
    try:
        try:
            command = [str(_SCRIPT), "start", str(folder), str(port), str(free_port())]
            subprocess.run(command, check=True, timeout=_START_S, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            raise ShadowServeError(f"Ceph's gateway does not start: {error.stderr or error.stdout}") from error
        endpoint = f"http://127.0.0.1:{port}"
        _create(endpoint, bucket)
        yield endpoint
    finally:
        subprocess.run([_SCRIPT, "stop", folder], check=True, timeout=_ANSWER_S)
        shutil.rmtree(folder.parent)


def _create(endpoint: str, bucket: str) -> None:
    credentials = Credentials(CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
    client = HttpClient(endpoint)
    headers = signed_headers("PUT", client.host, f"/{bucket}", "", credentials, "us-east-1")
    deadline_s = time.monotonic() + _ANSWER_S
    answer = client.request("PUT", f"/{bucket}", headers, deadline_s=deadline_s, bytes_max=1 << 16)
    client.close()
    if answer.status != http.HTTPStatus.OK:
        raise ShadowServeError(f"Ceph's gateway does not make a bucket: {answer.status} {bytes(answer.body)!r}")


@contextlib.contextmanager
def bucket_server(logs: Path) -> Iterator[tuple[str, str]]:
    """Yield the endpoint of BUCKET, on loopback of this thread's network namespace, and the server's name."""
    own = _REPOSITORY / "tests" / "faulty_s3.py"
    if not MISSING:
        with ceph_gateway(BUCKET) as endpoint:
            yield endpoint, "Ceph's gateway"
    elif own.exists():
        with started("bucket", [sys.executable, str(own)], logs) as server:
            yield f"http://{server.address}", "the tests' own server"
    else:
        raise ShadowServeError("a bucket takes a checkout of ShadowServe, with scripts/ and tests/; clone it")

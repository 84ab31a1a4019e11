"""A bucket for benchmarks and tests: Ceph's object gateway, where it is installed, or the tests' own server."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final
from unittest import mock

from shadowserve.errors import ShadowServeError
from shadowserve_tools.processes import free_port, started

__all__ = ["BUCKET", "CEPH_MISSING", "CREDENTIALS", "bucket_server", "ceph_gateway"]

REPOSITORY: Final = Path(__file__).resolve().parents[3]
BUCKET: Final = "kv-test"
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "testaccess", "AWS_SECRET_ACCESS_KEY": "testsecret12345"}
CEPH_MISSING: Final = next((name for name in ("ceph-mon", "ceph-osd", "radosgw") if shutil.which(name) is None), None)
_PATIENCE_S: Final = 300.0


@contextlib.contextmanager
def ceph_gateway(bucket: str) -> Iterator[str]:
    """Yield the endpoint, on loopback, of a gateway that has an empty bucket."""
    import obstore
    from obstore.store import S3Store

    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="ceph-")) / "node"  # paths of sockets are short
    script = REPOSITORY / "scripts" / "ceph"
    try:
        subprocess.run([script, "start", folder, str(port), str(free_port())], check=True, timeout=_PATIENCE_S)
        endpoint = f"http://127.0.0.1:{port}"
        with mock.patch.dict(os.environ, CREDENTIALS):
            store = S3Store(
                bucket, endpoint=endpoint, client_options={"allow_http": True}, virtual_hosted_style_request=False
            )
            url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=_PATIENCE_S) as answer:
            if answer.status != 200:
                raise ShadowServeError(f"Ceph's gateway makes no bucket: {answer.status}")
        yield endpoint
    finally:
        subprocess.run([script, "stop", folder], check=True, timeout=_PATIENCE_S)
        shutil.rmtree(folder.parent)


@contextlib.contextmanager
def bucket_server(logs: Path) -> Iterator[tuple[str, str]]:
    """Yield the endpoint of a bucket, on loopback of this thread's network namespace, and what it is.

    Raises:
        ShadowServeError: neither Ceph nor a checkout is there.
    """
    own = REPOSITORY / "tests" / "faulty_s3.py"
    if CEPH_MISSING is None and (REPOSITORY / "scripts" / "ceph").exists():
        with ceph_gateway(BUCKET) as endpoint:
            yield endpoint, "Ceph's gateway"
    elif own.exists():
        with started("bucket", [sys.executable, str(own)], logs) as server:
            yield f"http://{server.address}", "the tests' own server"
    else:
        raise ShadowServeError("a bucket takes a checkout of ShadowServe, with scripts/ and tests/; clone it")

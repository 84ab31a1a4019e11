"""Ceph's object gateway for tests, where it is installed: what S3 is when nobody wrote it for these tests."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import obstore
from machine import NEVER_S, PATIENCE_S, free_port
from obstore.store import S3Store

REPOSITORY = Path(__file__).parents[2]
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testaccess", "AWS_SECRET_ACCESS_KEY": "testsecret12345"}
MISSING = next((name for name in ("ceph-mon", "ceph-osd", "radosgw") if shutil.which(name) is None), None)


@contextlib.contextmanager
def ceph_gateway(bucket: str) -> Iterator[str]:
    """Yield the endpoint of a gateway that has an empty bucket."""
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="ceph-")) / "node"  # paths of sockets are short
    script = REPOSITORY / "scripts" / "ceph"
    try:
        subprocess.run([script, "start", folder, str(port), str(free_port())], check=True, timeout=NEVER_S)
        endpoint = f"http://127.0.0.1:{port}"
        with mock.patch.dict(os.environ, CREDENTIALS):
            store = S3Store(
                bucket, endpoint=endpoint, client_options={"allow_http": True}, virtual_hosted_style_request=False
            )
            url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=PATIENCE_S) as answer:
            assert answer.status == 200
        yield endpoint
    finally:
        subprocess.run([script, "stop", folder], check=True, timeout=NEVER_S)
        shutil.rmtree(folder.parent)

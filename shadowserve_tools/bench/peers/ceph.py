"""Ceph's object gateway, where it is installed: S3 as others serve it, on loopback, all that it holds in memory."""

import contextlib
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Final

import obstore
from obstore.store import S3Store

from shadowserve.errors import ShadowServeError
from shadowserve_tools.processes import free_port

__all__ = ["CREDENTIALS", "MISSING", "ceph_gateway"]

_SCRIPT: Final = Path(__file__).parents[3] / "scripts" / "ceph"
_PROGRAMS: Final = ("ceph-mon", "ceph-osd", "radosgw")
_START_S: Final = 300
_ANSWER_S: Final = 60
CREDENTIALS: Final = {"AWS_ACCESS_KEY_ID": "testaccess", "AWS_SECRET_ACCESS_KEY": "testsecret12345"}
"""Environment of whoever uses the gateway."""
MISSING: Final = (
    next((f"{name} is not installed" for name in _PROGRAMS if shutil.which(name) is None), "")
    or ("" if _SCRIPT.exists() else "scripts/ceph is not here: this is no checkout")
)  # fmt: skip
"""Why there is none here; empty where there is one."""


@contextlib.contextmanager
def ceph_gateway(bucket: str) -> Iterator[str]:
    """Yield the endpoint of a gateway that has an empty bucket.

    Raises:
        ShadowServeError: it is not installed, or does not start.
    """
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
        store = S3Store(
            bucket,
            endpoint=endpoint,
            access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            client_options={"allow_http": True},
            virtual_hosted_style_request=False,
        )
        url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=_ANSWER_S):
            pass  # anything but 200 is raised
        yield endpoint
    finally:
        subprocess.run([_SCRIPT, "stop", folder], check=True, timeout=_ANSWER_S)
        shutil.rmtree(folder.parent)

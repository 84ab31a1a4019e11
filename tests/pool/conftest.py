"""Import path of the modules beside this file, the end of each test's pools, and a bucket for tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest imports by path, so that folders need no __init__.py

from cold_support import CREDENTIALS, Opens, nodes  # noqa: E402
from faulty_s3 import FaultyS3, faulty_s3  # noqa: E402
from store_driver import Driver  # noqa: E402


@pytest.fixture(autouse=True)
def _closes_pools() -> Iterator[None]:
    yield
    while Driver.opened:
        Driver.opened.pop().store.close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A running S3 server, with its credentials in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with faulty_s3() as server:
        yield server


@pytest.fixture
def open_node(bucket: FaultyS3) -> Iterator[Opens]:
    """Opens nodes without devices over the bucket."""
    with nodes(bucket) as opens:
        yield opens

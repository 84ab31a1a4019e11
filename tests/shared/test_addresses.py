"""Addresses: their parser, and the test for addresses of this machine only."""

import pytest

from shadowserve.addresses import is_loopback, join_address, split_address


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 6380), ("::1", 0), ("node-1.example", 65535)])
def test_what_is_joined_is_split_into_the_same(host: str, port: int) -> None:
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize("text", ["", "6380", "node:", ":1", "node:65536", "node:-1", "node:\u0661", "::1:6380"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="IPv6 host needs brackets|not host:port"):
        split_address(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("::ffff:10.0.0.1", False),
        ("node-1.example", False),
        ("", False),
    ],
)
def test_what_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback

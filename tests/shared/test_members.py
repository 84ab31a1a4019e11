"""Members of a fleet: entries, files and names, and what happens when a list cannot be used."""

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shadowserve import members
from shadowserve.errors import ConfigurationError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a:1", "a:1=2"], "given twice"),
        (["a:0"], "port 0"),
        (["a:1=0"], "0.01 to 100"),
        (["a:1=nan"], "0.01 to 100"),
        ([f"a:{number}" for number in range(1, 258)], "at most 256"),
        ("a:1", "file:PATH"),
        ("dns:storage", "host:port"),
    ],
)
def test_wrong_members_are_refused(given: members.Given, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        members.check(given)


def test_a_file_has_one_member_on_each_line(tmp_path: Path) -> None:
    file = tmp_path / "members"
    file.write_text("# a comment\n10.0.0.1:6380\n\n[::1]:6380=2.5 # a larger one\n")
    assert members.read(f"file:{file}") == {"10.0.0.1:6380": 1.0, "[::1]:6380": 2.5}
    file.write_text("# nothing\n")
    with pytest.raises(ConfigurationError, match="no members"):
        members.first(f"file:{file}")


def test_addresses_of_a_service_have_the_names_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a node that gets another address keeps its segments."""
    names = {"10.0.0.1": "storage-0.storage.ns.svc.cluster.local", "10.0.0.2": "other.example", "fd00::3": None}

    def addresses(name: str, port: int, **_: Any) -> list[Any]:
        assert (name, port) == ("storage.ns", 6380)
        return [(0, 0, 0, "", (address, port)) for address in names]

    def reverse(address: tuple[str, int], _: int) -> tuple[str, str]:
        if (name := names[address[0]]) is None:
            raise socket.gaierror(socket.EAI_NONAME, "no name")
        return name, "0"

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    monkeypatch.setattr(socket, "getnameinfo", reverse)
    found = members.read("dns:storage.ns:6380")
    assert list(found) == ["storage-0.storage.ns.svc.cluster.local:6380", "10.0.0.2:6380", "[fd00::3]:6380"]
    assert members.first("dns:storage.ns:6380") == {"storage.ns:6380": 1.0}, "the start does not wait for DNS"
    assert members.service_of("dns:storage.ns:6380") == "storage.ns"


def test_a_passing_failure_of_reverse_dns_gives_no_member_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def reverse(address: tuple[str, int], _: int) -> tuple[str, str]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("10.0.0.1", 6380))])
    monkeypatch.setattr(socket, "getnameinfo", reverse)
    with pytest.raises(OSError, match=r"the reverse name of 10\.0\.0\.1: Temporary failure"):
        members.read("dns:storage.ns:6380")


async def test_a_member_that_one_answer_of_dns_lacks_stays_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may take longer than the limit of the first one."""
    answers = [["10.0.0.1", "10.0.0.2"], ["10.0.0.1"], ["10.0.0.1"], ["10.0.0.1"]]
    applied: asyncio.Queue[set[str]] = asyncio.Queue()
    refused: list[None] = []

    def addresses(name: str, port: int, **_: Any) -> list[Any]:
        if len(answers) == 3:
            time.sleep(1.2)
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(0, 0, 0, "", (address, port)) for address in found]

    async def apply(weights: Mapping[str, float]) -> None:
        applied.put_nowait(set(weights))

    monkeypatch.setattr(socket, "getaddrinfo", addresses)
    follower = members.Follower("dns:storage.ns:6380", 0.01, apply, lambda: refused.append(None), timeout_s=1.0)
    await follower.start()
    both = {"10.0.0.1:6380", "10.0.0.2:6380"}
    assert [await applied.get() for _ in range(3)] == [both, both, {"10.0.0.1:6380"}]
    assert not refused
    await follower.stop()


async def test_a_list_that_cannot_be_used_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "members"
    file.write_text("a:1\n")
    applied: asyncio.Queue[dict[str, float]] = asyncio.Queue()
    refused: asyncio.Queue[None] = asyncio.Queue()

    async def apply(weights: Mapping[str, float]) -> None:
        applied.put_nowait(dict(weights))

    def write(text: str) -> None:
        file.with_suffix(".new").write_text(text)
        os.replace(file.with_suffix(".new"), file)

    follower = members.Follower(f"file:{file}", 0.01, apply, lambda: refused.put_nowait(None))
    await follower.start()
    assert await applied.get() == {"a:1": 1.0}
    for text in ("", "a:1=much"):
        write(text)
        for _ in range(3):
            await refused.get()
    file.unlink()
    for _ in range(3):
        await refused.get()
    lines = [each.getMessage() for each in caplog.records if "members_refused" in each.getMessage()]
    assert len(lines) == 3, "each reason is logged once"
    while not applied.empty():
        assert await applied.get() == {"a:1": 1.0}
    write("a:1=2\nb:1\n")
    while (found := await applied.get()) == {"a:1": 1.0}:
        pass
    assert found == {"a:1": 2.0, "b:1": 1.0}
    await follower.stop()

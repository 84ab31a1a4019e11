"""Whoever dies between an announcement and the store that it promises: who waits for it hears of it, with one reason.

Real storage servers and data planes, each a process of its own; in the engines' place what they look prompts up with.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from machine import PATIENCE_S, free_port, wait_for
from stack import Process, data_plane

from host_control.client import DataPlaneClient
from host_control.handover import Handover
from host_control.lookup import LookupAnswer, PrefixLookup
from shadowserve.pieces import Flags, leading

CHUNK = 4
TOKENS = list(range(6 * CHUNK))


def leading_tokens(present: Sequence[Flags], tokens: int) -> int:
    return leading(present[0]) * CHUNK


class Sides:
    """A store, and a prefill and a decode engine's data planes and lookups."""

    def __init__(self) -> None:
        self.storage = Process("storage", "--port", str(free_port()))
        self.planes = [data_plane(self.storage.address) for _ in range(2)]
        self.clients = [DataPlaneClient(plane.address, connect_timeout=PATIENCE_S) for plane in self.planes]
        self.lookups = []
        for client in self.clients:
            assert client.wait_ready(PATIENCE_S)
            groups = [[(client, b"n" * 32)]]
            lookup = PrefixLookup(b"m" * 32, groups, leading_tokens, chunk_tokens=CHUNK, timeout=PATIENCE_S)
            self.lookups.append(lookup)
        self.prefill, self.decode = self.lookups

    def announce(self, seconds: float) -> None:
        """Have the prefill engine look the prompt up, and announce it."""
        self.prefill.submit("r", TOKENS, handover=Handover(announces=seconds))
        assert wait_for(lambda: self.prefill.poll("r")) == LookupAnswer(0, "complete")

    def wait(self, name: str = "r") -> None:
        """Have the decode engine wait for it."""

        def waits() -> bool:
            self.decode.forget(name)
            self.decode.submit(name, TOKENS, handover=Handover(waits=PATIENCE_S))
            wait_for(lambda: self.decode.poll(name) or self.decode._coming._waiting)
            return self.decode.poll(name) is None

        wait_for(waits)

    def answer(self, name: str = "r") -> LookupAnswer:
        found: LookupAnswer = wait_for(lambda: self.decode.poll(name))
        return found

    def close(self) -> None:
        for part in (*self.lookups, *self.clients):
            part.close()
        for process in (*self.planes, self.storage):
            process.stop()


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = Sides()
    yield sides
    sides.close()


FAULTS: dict[str, tuple[Callable[[Sides], Any], set[str]]] = {
    "the prefill engine's data plane dies": (lambda sides: sides.planes[0].kill(), {"announced_gone"}),
    "the prefill engine drops the store": (lambda sides: sides.prefill.forget("r"), {"announced_gone"}),
    "the store dies": (lambda sides: sides.storage.kill(), {"storage_unavailable"}),
    "the decode engine's data plane dies": (lambda sides: sides.planes[1].kill(), {"unreachable"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_who_waits_for_an_announced_chunk_hears_that_it_will_not_come(sides: Sides, fault: str) -> None:
    happen, reasons = FAULTS[fault]
    sides.announce(PATIENCE_S)
    sides.wait()
    happen(sides)
    answer = sides.answer()
    assert answer.tokens == 0 and answer.reason in reasons, answer


def test_the_announcements_of_an_engine_that_died_expire(sides: Sides) -> None:
    sides.announce(2.0)
    sides.wait()
    sides.prefill.close()  # nobody renews them any more, and nobody withdraws them
    answer = sides.answer()
    assert (answer.tokens, answer.reason) == (0, "announced_gone")


def test_a_store_that_died_and_is_back_hears_of_what_is_still_to_come(sides: Sides) -> None:
    sides.announce(2.0)
    sides.wait()
    sides.storage.kill()
    assert sides.answer().reason == "storage_unavailable"
    sides.storage.restart()
    sides.wait("again")
    sides.prefill.forget("r")
    assert sides.answer("again").reason == "announced_gone"

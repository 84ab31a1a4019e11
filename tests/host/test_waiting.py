"""Messages to data planes about an engine's queue: each change once and in order, and all of it on request."""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from machine import WAIT_MAX_S, wait_for
from scripted import Clock, ScriptedDataPlane

from host_control import waiting
from host_control.client import DataPlaneClient
from host_control.lookup import RecordKeys
from host_control.waiting import Begins, WaitingQueue
from shadowserve.proto import dataplane_pb2 as pb

NAMESPACE = b"n" * 32
MakeQueue = Callable[..., WaitingQueue]


def keys_of(name: str) -> list[bytes]:
    return [f"{name} {index}".encode().ljust(32, b".") for index in range(3)]


class Received:
    """A data plane's state after the messages; wrong numbers fail the test."""

    def __init__(self, plane: ScriptedDataPlane) -> None:
        self._plane = plane
        self.messages = 0
        self.keys: dict[int, list[bytes]] = {}
        self.order: list[str] = []
        self.begins: list[int] = []

    def read(self) -> list[str]:
        """Return the first keys of the waiting requests, in order."""
        for message in itertools.islice(list(self._plane.expected), self.messages, None):
            self.messages += 1
            if message.whole:
                self.keys = {}
            assert all(gone in self.keys for gone in message.gone), "unknown requests"
            for gone in message.gone:
                del self.keys[gone]
            for arrival in message.arrivals:
                assert arrival.request not in self.keys, "keys are sent once"
                self.keys[arrival.request] = [key for chain in arrival.chains for key in chain.keys]
            if message.order:
                self.order = [self.keys[name][0].split()[0].decode() for name in message.order]
                self.begins = list(message.begins_in_ms)
            self.order = [
                name
                for name in self.order
                if any(keys[0].startswith(name.encode() + b" ") for keys in self.keys.values())
            ]
        return self.order


@pytest.fixture
def known() -> dict[str, bool]:
    """Requests whose lookup has an answer; a request without an entry has one, too."""
    return {}


@pytest.fixture
def make_queue(client: DataPlaneClient) -> Iterator[MakeQueue]:
    """Return a function that makes a queue; ``look`` returns the keys of a request."""
    made = []

    def make(look: Callable[[str], list[bytes] | None] = keys_of, **options: Any) -> WaitingQueue:
        def records(request_id: str) -> RecordKeys | None:
            keys = look(request_id)
            return None if keys is None else {client: [(NAMESPACE, keys)]}

        client.connect(WAIT_MAX_S)
        made.append(WaitingQueue(records, [client], **options))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


@pytest.fixture
def queue(make_queue: MakeQueue, known: dict[str, bool], clock: Clock) -> WaitingQueue:
    return make_queue(lambda name: keys_of(name) if known.get(name, True) else None, clock=clock)


def test_priorities_come_before_the_order_of_arrival(make_queue: MakeQueue, plane: ScriptedDataPlane) -> None:
    queue = make_queue(by_priority=True)
    received = Received(plane)
    for name, priority in (("a", 2), ("b", 1), ("c", 2), ("d", 0)):
        queue.enqueue(name, priority)
    wait_for(lambda: received.read() == ["d", "b", "a", "c"])
    queue.begun("a")
    wait_for(lambda: received.read() == ["d", "b", "c"])
    queue.sent_back("a")
    wait_for(lambda: received.read() == ["d", "b", "a", "c"])


def test_requests_are_sent_once_they_are_looked_up(
    queue: WaitingQueue, known: dict[str, bool], plane: ScriptedDataPlane
) -> None:
    received = Received(plane)
    known["a"] = False
    queue.enqueue("a")
    queue.enqueue("b")
    wait_for(lambda: received.read() == ["b"])
    known["a"] = True
    wait_for(lambda: received.read() == ["a", "b"])


def test_the_records_of_a_waiting_request_can_be_replaced(
    queue: WaitingQueue, client: DataPlaneClient, plane: ScriptedDataPlane
) -> None:
    queue.enqueue("a")
    wait_for(lambda: plane.expected)
    other = [b"k" * 32, b"l" * 32]
    queue.wants("a", {client: [(NAMESPACE, other)]})
    wait_for(lambda: [list(each.chains[0].keys) for each in plane.expected[-1].arrivals] == [other])
    queue.wants("unknown", {client: [(NAMESPACE, other)]})


def test_a_turn_in_an_hour_takes_no_memory_of_requests_that_wait_now(
    queue: WaitingQueue, client: DataPlaneClient, plane: ScriptedDataPlane, clock: Clock
) -> None:
    received, clock.now = Received(plane), 100.0
    queue.expect_turn(b"later", {client: [(NAMESPACE, keys_of("later"))]}, 3600.0)
    queue.expect_turn(b"soon", {client: [(NAMESPACE, keys_of("soon"))]}, waiting._TURN_AHEAD_S)
    queue.enqueue("now")
    wait_for(lambda: received.read() == ["now", "soon"])
    queue.ended("now")
    clock.now += 3600.0 - waiting._TURN_AHEAD_S
    wait_for(lambda: received.read() == ["later"])


def test_a_step_in_which_nothing_changes_says_nothing(
    queue: WaitingQueue, plane: ScriptedDataPlane, clock: Clock
) -> None:
    clock.now = 100.0
    queue.enqueue("a")
    wait_for(lambda: len(plane.expected) == 1)
    time.sleep(0.3)
    assert len(plane.expected) == 1
    for messages in (2, 3):
        clock.now += waiting._BEAT_S
        wait_for(lambda messages=messages: len(plane.expected) == messages)
    assert not any(each.arrivals or each.order or each.whole for each in plane.expected[1:]), (
        "only that the request still waits"
    )


def test_events_during_a_message_go_into_the_next_one(queue: WaitingQueue, plane: ScriptedDataPlane) -> None:
    plane.script.stall.add("Expect")
    queue.enqueue("a")
    plane.wait_for_call("Expect")
    begin = time.monotonic()
    for number in range(1000):
        queue.enqueue(f"r{number}")
        queue.begun(f"r{number}")
    queue.enqueue("b")
    assert time.monotonic() - begin < WAIT_MAX_S / 10, "the engine's thread does not wait"
    plane.script.stall.clear()
    plane.script.unstall.set()
    received = Received(plane)
    wait_for(lambda: received.read() == ["a", "b"])
    assert received.messages == 2


def test_a_data_plane_that_lacks_messages_is_sent_everything(queue: WaitingQueue, plane: ScriptedDataPlane) -> None:
    plane.script.expect_answer = lambda request: pb.ExpectResponse(again=not request.whole)
    for name in "abc":
        queue.enqueue(name)
    received = Received(plane)
    wait_for(lambda: received.read() == ["a", "b", "c"])
    queue.begun("a")
    wait_for(lambda: plane.expected[-1].whole and received.read() == ["b", "c"])
    numbers = [each.number for each in plane.expected]
    assert numbers == sorted(set(numbers)), "the number identifies later messages"


def test_a_restarted_data_plane_is_sent_everything_after_hello(
    queue: WaitingQueue, client: DataPlaneClient, plane: ScriptedDataPlane
) -> None:
    received = Received(plane)
    queue.enqueue("a")
    wait_for(lambda: received.read() == ["a"])
    plane.forget_hosts()
    queue.enqueue("b")
    wait_for(lambda: client.peer is None)
    client.connect(WAIT_MAX_S)
    wait_for(lambda: received.read() == ["a", "b"])
    assert plane.expected[-1].whole


@pytest.mark.parametrize("how", ["unused", "unknown"])
def test_a_data_plane_that_ignores_messages_gets_no_more(
    queue: WaitingQueue, client: DataPlaneClient, plane: ScriptedDataPlane, how: str
) -> None:
    if how == "unused":
        plane.script.expect_answer = lambda request: pb.ExpectResponse(unused=True)
    else:
        plane.script.abort["Expect"] = grpc.StatusCode.UNIMPLEMENTED
    queue.enqueue("a")
    plane.wait_for_call("Expect")
    for name in "bcd":
        queue.enqueue(name)
        time.sleep(0.05)
    assert plane.calls.count("Expect") == 1
    plane.script.abort.clear()
    client.connect(WAIT_MAX_S)  # perhaps another one
    wait_for(lambda: plane.calls.count("Expect") == 2)


def test_a_data_plane_that_fails_is_not_stormed(queue: WaitingQueue, plane: ScriptedDataPlane, clock: Clock) -> None:
    clock.now = 100.0
    plane.script.abort["Expect"] = grpc.StatusCode.RESOURCE_EXHAUSTED
    queue.enqueue("a")
    plane.wait_for_call("Expect")
    time.sleep(0.4)
    assert plane.calls.count("Expect") == 1
    plane.script.abort.clear()
    clock.now += waiting._FAILED_S
    received = Received(plane)
    wait_for(lambda: received.read() == ["a"])


def test_long_queues_and_long_prompts_go_in_messages_of_bounded_size(
    make_queue: MakeQueue, plane: ScriptedDataPlane
) -> None:
    queue = make_queue(lambda name: [index.to_bytes(32, "little") for index in range(3000)])
    for number in range(2000):
        queue.enqueue(str(number))
    wait_for(lambda: sum(len(each.arrivals) for each in plane.expected) >= 10)
    assert all(len(each.arrivals) <= 2 and len(each.order) <= 1024 for each in plane.expected)


def test_requests_are_expected_as_others_have_begun() -> None:
    begins = Begins()
    assert begins.expected(0, 5.0) == math.inf
    for at in (10.0, 10.0, 11.0, 11.0, 12.0):  # two per second, in pairs
        begins.begun(at, others=True)
    assert begins.expected(0, 12.0) == pytest.approx(0.5)
    assert begins.expected(4, 12.0) == pytest.approx(2.5)
    assert begins.expected(0, 12.3) == pytest.approx(0.2)
    assert begins.expected(0, 20.0) == pytest.approx(0.125), "overdue: it may begin at any moment"
    begins.begun(21.0, others=False)
    assert begins.expected(0, 30.0) == math.inf, "no request waited, so the duration is no measurement"


def test_expected_begins_are_sent_and_corrected(queue: WaitingQueue, plane: ScriptedDataPlane, clock: Clock) -> None:
    clock.now = 100.0
    for number in range(12):
        queue.enqueue(f"r{number}")
    for number in range(5):
        clock.now += 0.1
        queue.begun(f"r{number}")
    received = Received(plane)
    wait_for(lambda: received.read() == [f"r{number}" for number in range(5, 12)] and received.begins)
    assert received.begins == pytest.approx(range(100, 800, 100), abs=1)
    clock.now += 1.0  # it is overdue
    wait_for(lambda: received.read() and received.begins == pytest.approx(range(25, 700, 100), abs=1))


def test_an_unchanged_queue_is_rarely_sent(queue: WaitingQueue, plane: ScriptedDataPlane) -> None:
    """Symptom: with waiting requests, corrections of the expected start took 2 % of the engine's core."""
    for number in range(30):
        queue.enqueue(f"r{number}")
    for number in range(2):
        time.sleep(0.2)
        queue.begun(f"r{number}")
    wait_for(lambda: plane.expected and len(plane.expected[-1].begins_in_ms) == 28)
    before, began = len(plane.expected), time.monotonic()
    wait_for(lambda: len(plane.expected) >= before + 4)  # overdue, and so sent again
    assert time.monotonic() - began > 3 * waiting._CORRECTS_S


def test_after_any_history_the_data_plane_has_the_waiting_requests(
    queue: WaitingQueue, plane: ScriptedDataPlane
) -> None:
    chance = random.Random(3)
    order: list[str] = []
    running: list[str] = []
    names = (f"r{number}" for number in itertools.count())
    received = Received(plane)
    queue.begun("unknown")
    for turn in range(300):
        kind = chance.choice(["arrive", "arrive", "begin", "back", "end"])
        if kind == "arrive":
            order.append(next(names))
            queue.enqueue(order[-1])
        elif kind == "begin" and order:
            running.append(order.pop(0))
            queue.begun(running[-1])
        elif kind == "back" and running:
            order.insert(0, running.pop(chance.randrange(len(running))))
            queue.sent_back(order[0])
        elif kind == "end" and (order or running):
            some = chance.choice([each for each in (order, running) if each])
            queue.ended(name := some.pop(chance.randrange(len(some))))
            queue.sent_back(name)  # too late
        if turn % 50 == 49:
            wait_for(lambda: received.read() == order)

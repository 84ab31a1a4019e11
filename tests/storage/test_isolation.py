"""Tenants that share a node: one tenant's requests do not delay another's, and are bounded and counted."""

import socket
import threading
from collections.abc import Callable, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest
from machine import NEVER_S, WAIT_MAX_S, wait_for
from slow_store import Served
from storage_support import Client, Start, login, make_node
from test_client_memory import MIB, Weighed
from test_layers import LAYERS, check, stored
from test_shaper import MBIT, Run, Sent, shared

from shadowserve.fair_queue import FairQueue
from shadowserve.resp import ErrorReply, encode_command
from storage_kv.access.memory import Account, MemoryBudget
from storage_kv.clients.connection import Connection
from storage_kv.clients.event_loop import EventLoop
from storage_kv.clients.workers import Workers
from storage_kv.egress import Demand
from storage_kv.pending_keys import PendingKeys
from storage_kv.session import Session
from storage_kv.shaper import Flow, Others

PATIENT = ("--memory-budget-bytes", "64 MiB", "--layers-timeout-s", str(NEVER_S), "--stall-timeout-s", str(NEVER_S))


@pytest.fixture
def begin(start_tenants: Start) -> Start:
    """Start a server with several tenants, by default with very long timeouts."""
    return lambda *flags: start_tenants(*PATIENT, *flags)


def number_of(client: Client, name: str) -> int:
    return int(client.info()[name])


# ---- KV.LAYERS


def test_unread_streams_do_not_delay_other_tenants(begin: Start) -> None:
    """Symptom: six connections stopped KV.LAYERS of all tenants for 75 s."""
    child = begin("--layers-bits-per-s-min", "0")
    root, ann = login(child, "root"), login(child, "ann")
    records = stored(ann, 4, layer_bytes=64 << 10)
    for name in ("bob", "eve"):
        asked = list(stored(login(child, name), 8, layer_bytes=256 << 10))
        for _ in range(6):
            login(child, name, receive_buffer=4096).send("KV.LAYERS", "0-3", 0, 0, *asked)
    wait_for(lambda: number_of(root, "layer_streams_active") and number_of(root, "layer_streams_waiting"))
    for _ in range(3):
        check(ann.call("KV.LAYERS", "0-3", 0, 0, *records), list(records), records, range(LAYERS))
    assert number_of(root, "layer_streams_waiting") > 0, "the other streams must wait for their own tenants' shares"


def test_a_rate_limited_tenant_does_not_delay_others(begin: Start) -> None:
    """Symptom: a tenant limited to 1 MiB per second delayed another one for 34 s."""
    child = begin("--tenants", "{b: {bytes_per_s: 1 MiB}}", "--memory-budget-bytes", "128 MiB")
    root, ann = login(child, "root"), login(child, "ann")
    records = stored(ann, 4, layer_bytes=64 << 10)
    bob = login(child, "bob")
    asked = list(stored(bob, 2, layer_bytes=256 << 10))
    bobs = [login(child, "bob", receive_buffer=4096) for _ in range(4)]
    for client in bobs:
        client.send("KV.LAYERS", "0-3", 0, 0, *asked)
    wait_for(lambda: number_of(root, "layer_streams") >= 4)
    check(ann.call("KV.LAYERS", "0-3", 0, 0, *records), list(records), records, range(LAYERS))
    assert number_of(root, "layer_streams_active") + number_of(root, "layer_streams_waiting") > 0


def test_a_rate_that_is_too_low_or_takes_too_long_is_refused_and_says_why(begin: Start) -> None:
    """Symptom: a rate of one bit per second was accepted."""
    child = begin("--layers-timeout-s", "60")
    ann = login(child, "ann")
    records = stored(ann, 4, layer_bytes=256 << 10)
    assert b"layers_bits_per_s_min" in ann.refused("KV.LAYERS", "0-3", 1, 0, *records)
    assert b"at least 1000000" in ann.refused("KV.LAYERS", "0-3", 500_000, 0, *records)
    late = begin("--layers-timeout-s", "2")
    ann = login(late, "ann")
    records = stored(ann, 4, layer_bytes=256 << 10)
    refused = ann.call("KV.LAYERS", "0-3", 10**6, 0, *records)  # 4 MiB take half a minute
    assert isinstance(refused, ErrorReply) and refused.startswith(b"TIMEOUT KV.LAYERS has ended: it needs 3")
    check(ann.call("KV.LAYERS", "0-3", 10**9, 0, *records), list(records), records, range(LAYERS))


def test_a_stream_that_waits_for_too_long_is_answered_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with Served(layers_timeout_s=1.0) as server:
        client = server.client()
        records = stored(client, 2)
        server.store.away = True
        refused = client.call("KV.LAYERS", "0-3", 0, 0, *records)  # the reads never end
        assert isinstance(refused, ErrorReply) and refused.startswith(b"TIMEOUT KV.LAYERS has ended: it took")
        assert client.call("PING") == b"PONG"
        for _ in records:
            server.store.finish_read()
        wait_for(lambda: number_of(client, "clients_memory_bytes") == 0 and number_of(client, "lent_bytes") == 0)
        assert number_of(client, "layer_streams_closed") == 1


def test_a_client_that_reads_layers_too_slowly_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CHECK_INTERVAL_S", "_PACE_S", "_ERROR_GRACE_S"):
        monkeypatch.setattr(f"storage_kv.layers.{name}", 0.1)
    with Served(layers_bits_per_s_min=1e9) as server:
        other, slow = server.client(), server.client(receive_buffer=4096)
        asked = list(stored(slow, 8, layer_bytes=256 << 10))
        slow.send("KV.LAYERS", "0-3", 0, 0, *asked)
        wait_for(lambda: number_of(other, "layer_streams_closed") == 1)
        wait_for(lambda: number_of(other, "lent_bytes") == 0)
        with pytest.raises((EOFError, ConnectionError)):
            slow.receive()


def test_memory_of_requests_for_layers_is_counted_before_use(begin: Start) -> None:
    """Symptom: 1,000 connections with one request each made a server of 64 MiB use 1,469 MiB, uncounted."""
    flags = ("--clients-memory-bytes-max", "64 MiB", "--layers-bits-per-s-min", "0")
    child = begin("--tenants", "{b: {bytes_max: 16 MiB}}", *flags)
    root, ann, bob = login(child, "root"), login(child, "ann"), login(child, "bob")
    asked = list(stored(bob, 900, layer_bytes=256)) + [b"kv:%064x" % number for number in range(100)]
    records = stored(ann, 4)
    weighed = Weighed(child)
    request = encode_command("KV.LAYERS", "0-31", 0, 0, *asked)
    for _ in range(200):
        client = login(child, "bob", receive_buffer=4096)
        client.socket.sendall(request)
    wait_for(lambda: number_of(root, "layer_streams_active") > 0 and number_of(root, "clients_memory_bytes") > 8 * MIB)
    for _ in range(5):
        check(ann.call("KV.LAYERS", "0-3", 0, 0, *records), list(records), records, range(LAYERS))
        assert number_of(root, "clients_memory_bytes") <= 64 * MIB
    assert weighed.grown < 64 * MIB + 100 * MIB
    child.close_clients()
    with login(child, "root") as left:
        wait_for(lambda: number_of(left, "clients_memory_bytes") == 0 and number_of(left, "lent_bytes") == 0)


def test_a_request_for_layers_that_would_take_too_much_is_refused(begin: Start) -> None:
    child = begin("--clients-memory-bytes-max", "8 MiB")
    ann = login(child, "ann")
    for keys, layers in ((4000, "0-1023"), (600, ",".join(map(str, range(0, 128, 2))))):  # layers with gaps: reads each
        refused = ann.refused("KV.LAYERS", layers, 0, 0, *[b"k%d" % number for number in range(keys)])
        assert refused.startswith(b"OOM this request needs")


def test_arguments_of_an_unread_reply_are_counted(begin: Start) -> None:
    """Symptom: values were counted on arrival, but not after the start of their command."""
    child = begin("--clients-memory-bytes-max", "64 MiB")
    root, bob = login(child, "root"), login(child, "bob", receive_buffer=4096)
    assert bob.call("SET", "a", bytes(15_000)) == b"OK"
    bob.send("MGET", *["a"] * 1000, *[b"%d" % number + bytes(8000) for number in range(1000)])
    wait_for(lambda: number_of(root, "clients_memory_bytes") > 8 * MIB)


# ---- FairQueue


def test_tenants_and_then_clients_take_turns_by_cost() -> None:
    turns: FairQueue[str] = FairQueue()
    for number in range(100):
        turns.add(1, 10, f"a{number}")
    turns.add(1, 11, "b")
    turns.add(2, 20, "c0")
    turns.add(2, 20, "c1")
    order = []
    while tenants := turns.tenants():
        item = turns.first(tenants[0])
        order.append(item)
        turns.charge(tenants[0], 5)
    assert order[:5] == ["a0", "c0", "b", "c1", "a1"] and len(order) == 103
    assert order[5:] == [f"a{number}" for number in range(2, 100)], "a client's own requests must keep their order"


def test_a_returning_tenant_gets_no_extra_turns() -> None:
    turns: FairQueue[int] = FairQueue()
    for number in range(10):
        turns.add(1, 1, number)
    for _ in range(5):
        turns.charge(1, 100)
    for number in range(10):
        turns.add(2, 2, number)
    order = []
    for _ in range(8):
        order.append(turns.tenants()[0])
        turns.charge(order[-1], 100)
    assert order.count(1) == order.count(2) == 4


def test_a_tenant_of_twice_the_weight_has_twice_the_turns() -> None:
    turns: FairQueue[int] = FairQueue()
    for number in range(100):
        turns.add(1, 1, number)
        turns.add(2, 2, number)
    order = []
    for _ in range(30):
        order.append(turns.tenants()[0])
        turns.charge(order[-1], 10, 2.0 if order[-1] == 2 else 1.0)
    assert order.count(2) == 20


def test_an_event_loop_serves_each_tenant_in_turn() -> None:
    """Symptom: a thousand busy connections were served before the next event, and a PING waited a second."""
    loop = EventLoop()
    crowd, other = loop.enter(1), loop.enter(2)
    served: list[str] = []
    done = threading.Event()

    def busy() -> None:
        served.append("crowd")
        ends = threading.Event()
        ends.wait(0.002)  # more than its turn
        loop.call_soon(busy, crowd)

    def last() -> None:
        served.append("other")
        loop.stop()
        done.set()

    for _ in range(1000):
        loop.call_soon(busy, crowd)
    thread = threading.Thread(target=loop.run)
    thread.start()
    wait_for(lambda: len(served) > 1)
    waiting = len(served)
    loop.call_threadsafe(last, other)
    assert done.wait(WAIT_MAX_S)
    thread.join()
    loop.close()
    assert served.index("other") < waiting + 500, "it must wait for a part of one turn, not for all others"


def test_verifying_a_record_does_not_wait_for_another_tenants_queue() -> None:
    """Symptom: a hundred records of one tenant were verified before a later one of another tenant."""
    workers, order, go_on = Workers(1), [], threading.Event()
    crowd = Session(1, address="a")
    other = Session(2, address="a")
    crowd.tenant, other.tenant = 1, 2

    def check_of(name: str) -> Callable[[], None]:
        def work() -> None:
            assert go_on.wait(WAIT_MAX_S)
            order.append(name)

        return work

    done = [workers.submit(crowd, check_of("crowd")) for _ in range(100)]
    done.append(workers.submit(other, check_of("other")))
    go_on.set()
    for each in done:
        each.result(WAIT_MAX_S)
    workers.stop()
    assert order.index("other") <= 2
    assert workers.submit(crowd, check_of("late")).cancelled()


# ---- The link


def test_tenants_share_the_link_whatever_each_requests() -> None:
    run = Run(shared())
    for _ in range(9):
        flow = Flow(Demand(10_000, 0.1, 10_000), inf, tenant=1)
        run.left[flow], flow.next_bits = 10_000, 80_000
        run.shaper.enter(flow, run.now_s)
    alone = Flow(Demand(10_000, 0.1, 10_000), inf, tenant=2)
    run.left[alone], alone.next_bits = 10_000, 80_000
    run.shaper.enter(alone, run.now_s)
    run.go(0.05)
    assert alone.rate == pytest.approx(50 * MBIT)
    assert sum(flow.rate for flow in run.shaper.flows) == pytest.approx(100 * MBIT)
    alone.weight = 3.0
    run.go(0.05)
    assert alone.rate == pytest.approx(75 * MBIT)
    alone.limit = 10 * MBIT
    run.go(0.05)
    assert sum(flow.rate for flow in run.shaper.flows) == pytest.approx(100 * MBIT), (
        "the other flows must get unused rate"
    )


def test_each_client_has_its_own_debt() -> None:
    """Symptom: another tenant's PING waited 2.8 s for the debt of this tenant."""
    run = Run(shared())
    others = run.shaper.others
    run.enter(10_000, 0.1, 100_000)
    run.go(0.001)
    greedy, same, other = Sent(1, 1), Sent(2, 1), Sent(3, 2)
    for each in (greedy, same, other):
        others.charge(each, 100, run.now_s)
    run.go(0.05)
    others.charge(greedy, 10_000_000, run.now_s)
    assert others.wait_s(greedy, run.now_s) > 0
    assert others.wait_s(same, run.now_s) == others.wait_s(other, run.now_s) == 0.0
    assert others.wait_s(Sent(4, 1), run.now_s) == 0.0
    others.leave(greedy)
    assert others.wait_s(Sent(5, 1), run.now_s) > 0, "a new connection must keep the tenant's debt"
    assert others.wait_s(Sent(6, 2), run.now_s) == 0.0


class BreaksOff:
    """A transport that sends one batch of buffers, then finds the client gone."""

    is_secure = read_wants_write = write_wants_read = False

    def __init__(self) -> None:
        self.socket, client = socket.socketpair()
        client.close()
        self._sends = 0

    def sendmsg(self, parts: Sequence[bytes | memoryview]) -> int:
        self._sends += 1
        if self._sends > 1:
            raise ConnectionResetError
        return sum(map(len, parts))


def test_a_client_that_breaks_off_while_it_is_sent_to_is_forgotten_and_its_tenant_keeps_the_debt() -> None:
    node = make_node()
    node.streams = SimpleNamespace(others=(others := Others()))
    others.rate = 1e3
    session, transport = Session(1, "127.0.0.1:1", authenticated=True), BreaksOff()
    workers, loop = Workers(1), EventLoop()
    connection = Connection(node, workers, lambda session: None, cast(Any, transport), session, loop)
    with node.lock:
        for _ in range(100):
            connection._executor.replies.append(b"x" * 1000)
    connection.finish()
    assert node.counters.sent_bytes == 64_000
    assert not others._tenants[session.tenant].clients and others._tenants[session.tenant].left.credit < 0
    loop.close()


def test_a_client_with_one_request_at_a_time_is_limited_too(begin: Start) -> None:
    child = begin("--egress-bits-per-s", "1e8")
    ann, bob, slow = login(child, "ann"), login(child, "bob"), login(child, "bob", receive_buffer=4096)
    asked = list(stored(slow, 4, layer_bytes=64 << 10))
    slow.send("KV.LAYERS", "0-3", 2_000_000, 0, *asked)  # 4 s, and the link is shared meanwhile
    assert ann.call("SET", "a", bytes(MIB)) == b"OK" and bob.call("SET", "b", bytes(MIB)) == b"OK"
    got = threading.Event()

    def one_after_the_other() -> None:
        for _ in range(20):
            assert len(bob.call("GET", "b")) == MIB
        got.set()

    thread = threading.Thread(target=one_after_the_other)
    thread.start()
    pings = 0
    while not got.is_set():
        assert ann.call("PING") == b"PONG"
        pings += 1
    thread.join()
    assert pings > 20, "the server must answer them between the other tenant's values"


# ---- Memory


class Holder:
    moved_bytes = 0

    def on_room(self) -> None: ...

    def evict(self, held_bytes: int) -> None: ...


def test_two_tenants_with_half_each_leave_room_for_a_third() -> None:
    budget = MemoryBudget(lambda: 1600, lambda: 4, is_own_memory=True)
    accounts = [Account(budget, Holder(), tenant) for tenant in (1, 2, 3)]
    assert accounts[0].admit(800) and not accounts[0].admit(10)
    assert accounts[1].admit(600) and not accounts[1].admit(10), "a large account must not use the last eighth"
    assert accounts[2].admit(50), "its part of the last eighth"
    assert not accounts[2].admit(200)


# ---- PendingKeys


def test_only_the_longest_lasting_clients_of_a_pending_key_are_kept() -> None:
    """Symptom: 2,000 clients of a pending key delayed another tenant for 1.7 s."""
    pending_keys = PendingKeys(lambda: 2)
    key = (1, b"key")
    for client in range(2000):
        pending_keys.add(client, [key], 0, 10_000 + client % 1000)
    assert pending_keys.until_ms(key, 5000) == 10_999
    noted = [client for client in range(2000) if pending_keys.withdraw(client, [key])]
    assert 2 <= len(noted) <= 8 and {999, 1999} <= set(noted)
    assert pending_keys.until_ms(key, 5000) == 0
    for client in range(2000):  # keys of disconnected clients free space for connected ones
        pending_keys.add(client, [key], 0, 20_000)
        pending_keys.leave(client)
    pending_keys.add(5000, [key], 0, 15_000)
    assert pending_keys.until_ms(key, 5000) == 15_000


def test_two_tenants_that_publish_all_they_may_leave_room_for_a_third(begin: Start) -> None:
    child = begin()
    for name in ("ann", "bob"):
        for turn in range(2):
            client = login(child, name)
            for part in range(4):
                client.call("KV.PUBLISH", 60_000, *(f"{turn} {part} {number}" for number in range(4096)))
    eve = login(child, "eve")
    assert eve.call("KV.PUBLISH", 60_000, *(f"e{number}" for number in range(500))) == 500

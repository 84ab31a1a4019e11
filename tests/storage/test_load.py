"""KV.LOAD: how long the bytes that wait for clients need on the link."""

import pytest
from machine import wait_for
from storage_support import Start, login, make_record

from shadowserve.resp import ErrorReply
from storage_kv.link_load import LOAD_US_MAX, LinkLoad

MIB = 1 << 20


def test_the_load_is_the_waiting_bytes_over_the_rate_of_the_link() -> None:
    load = LinkLoad()
    assert load.microseconds(0) == 0, "an idle node"
    load.replies_bytes, load.layers_bytes = 10**6, 10**6
    assert load.microseconds(8e6) == 2_000_000, "the configured rate is 1 MB/s"
    for number in range(40):  # the link carries 10 MB/s, while bytes wait
        load.measure(number * 10**6, number / 10)
    assert load.microseconds(0) == pytest.approx(200_000, rel=0.01)
    assert (load.microseconds(8e6), load.microseconds(8e9)) == (2_000_000, 2_000), "a configured rate is used"
    load.measure(49 * 10**6, 4.0)
    assert load.microseconds(0) == pytest.approx(20_000), "a higher rate counts at once"
    load.replies_bytes = 0
    load.measure(50 * 10**6, 5.0)
    load.replies_bytes = 10**6
    load.measure(50 * 10**6 + 1, 6.0)
    assert load.microseconds(0) == pytest.approx(20_000), "few bytes of an idle node are no measurement"
    load.replies_bytes = 1 << 60
    assert load.microseconds(0) == LOAD_US_MAX


def test_replies_and_layers_load_a_node_and_a_client_that_reads_slowly_does_not(start_tenants: Start) -> None:
    server = start_tenants("--egress-bits-per-s", "1e9")
    ann, root = login(server, "ann", receive_buffer=4096), login(server, "root")
    assert ann.call("SET", "value", b"v" * (8 * MIB)) == b"OK"
    assert root.call("KV.LOAD") == 0 and float(root.info()["load_seconds"]) == 0
    loads: list[int] = []

    def is_loaded() -> bool:
        found = root.call("KV.LOAD")
        loads.append(found)
        return loads[-1] > 0

    def is_loaded_by_another() -> bool:  # for a tenth of a second, until the node sees how it reads
        login(server, "ann", receive_buffer=4096).send("GET", "value")
        return is_loaded()

    wait_for(is_loaded_by_another)
    assert 2 * MIB * 8e-3 < loads[-1] < 8.1 * MIB * 8e-3 * len(loads), "the rest of the values at 1 Gbit/s"
    ann.send("GET", "value")
    got = 0

    def is_idle() -> bool:  # a client that reads little at a time waits for itself, not for the link
        nonlocal got
        got += len(ann.socket.recv(4096))
        return root.call("KV.LOAD") == 0

    for _ in range(3):
        wait_for(is_idle)
    assert got < 4 * MIB, "the rest still waits"
    bob = login(server, "bob")
    key, value = make_record(b"k" * 32, body_bytes=MIB // 2)
    assert bob.call("SET", key, value) == b"OK"
    bob.send("KV.LAYERS", "0-1", 32 * MIB, 0, key)  # two layers, of 60 ms each
    wait_for(is_loaded)
    assert loads[-1] < 0.11 * 32 * MIB / 1e3, "what its own rate allows in a tenth of a second"
    assert bob.receive()
    wait_for(lambda: root.call("KV.LOAD") == 0)


def test_every_user_who_may_read_sees_the_load(start_tenants: Start) -> None:
    server = start_tenants(users="user default off\nuser root on >r ~* &* +@all\nuser ann on >a ~x* -@all +@read\n"
                                 "user bob on >b ~x* -@all +@write\n")  # fmt: skip
    assert login(server, "ann").call("KV.LOAD") == 0
    assert isinstance(login(server, "bob").call("KV.LOAD"), ErrorReply)

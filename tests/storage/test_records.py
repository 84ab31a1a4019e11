"""Records are immutable and verified; KV.META describes them."""

import pytest
from storage_support import Child, Client, make_record

from shadowserve import record
from shadowserve.keys import storage_key

SMALL, LARGE = 4096, 3 << 20  # checked at once, and in another thread


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_second_record_of_the_same_key_is_answered_ok_and_dropped(client: Client, size: int) -> None:
    key, first = make_record(b"a" * 32, body_bytes=size, fill=1)
    _, second = make_record(b"a" * 32, body_bytes=size, fill=2)
    assert first != second
    before = client.info()
    assert client.call("SET", key, first, "EX", 1000) == b"OK"
    assert client.call("SET", key, second) == b"OK"
    assert client.call("GET", key) == first
    assert client.call("TTL", key) == 1000  # nothing changes, not even the expiry
    after = client.info()
    assert int(after["records_stored"]) - int(before["records_stored"]) == 1
    assert int(after["records_kept"]) - int(before["records_kept"]) == 1
    assert after["records"] == "1" and after["record_bytes"] == str(len(first))


def test_other_values_follow_redis(client: Client) -> None:
    key, value = make_record(b"a" * 32)
    assert client.call("SET", key, "no record") == b"OK"
    assert client.call("SET", key, value) == b"OK" and client.call("GET", key) == value
    assert client.call("SET", key, value, "NX") is None
    assert client.call("SET", key, value, "GET") == value
    assert client.call("SET", key, "plain again") == b"OK" and client.call("GET", key) == b"plain again"
    assert client.call("SET", key, value, "XX", "EX", 50) == b"OK" and client.call("TTL", key) == 50
    assert client.call("DEL", key) == 1
    assert client.call("SET", key, value, "XX") is None and client.call("EXISTS", key) == 0


def faulty_records() -> dict[str, tuple[bytes, bytes]]:
    key, value = make_record(b"a" * 32)
    other_key, _ = make_record(b"b" * 32)
    return {
        "under another key": (other_key, value),
        "under a key that names no chunk": (b"plain", value),
        "under a key in capitals": (b"kv:" + key[3:].upper().replace(b"61", b"6A"), value),
        "only a magic": (key, record.MAGIC),
        "cut off in the manifest": (key, value[:150]),
        "with bytes behind it": (key, value + b"x"),
        "of another version": (key, value[:4] + b"\x63\0" + value[6:]),
        "with a flipped bit": (key, value[:-1] + bytes([value[-1] ^ 1])),
    }


@pytest.mark.parametrize("name", faulty_records())
def test_an_invalid_record_is_refused(client: Client, name: str) -> None:
    key, value = faulty_records()[name]
    client.call("SET", key, "before")
    refused = int(client.info()["records_refused"])
    assert client.refused("SET", key, value).startswith(b"ERR record refused, nothing was stored: ")
    assert client.call("GET", key) == b"before"
    assert int(client.info()["records_refused"]) == refused + 1


def test_a_large_faulty_record_is_refused_and_the_first_one_stays(client: Client) -> None:
    key, value = make_record(b"a" * 32, body_bytes=LARGE)
    assert client.call("SET", key, value) == b"OK"
    flipped = bytearray(value)
    flipped[-1] ^= 1
    assert b"checksum" in client.refused("SET", key, bytes(flipped))
    assert client.call("GET", key) == value


def test_commands_behind_a_large_record_wait_for_it_and_keep_their_order(client: Client) -> None:
    key, value = make_record(b"a" * 32, body_bytes=LARGE)
    client.send("EXISTS", key)
    client.send("SET", key, value)
    client.send("STRLEN", key)
    client.send("SET", key, value, "NX")
    client.send("PING")
    assert [client.receive() for _ in range(5)] == [0, b"OK", len(value), None, b"PONG"]


def test_others_are_served_while_a_large_record_is_checked(shared_server: Child, client: Client) -> None:
    key, value = make_record(b"a" * 32, body_bytes=32 << 20)
    with shared_server.client() as other:
        client.send("SET", key, value)
        assert other.call("PING") == b"PONG"
        assert client.receive() == b"OK"


@pytest.mark.parametrize("protocol", [2, 3])
def test_kv_meta_returns_length_and_header_of_records_and_nil_otherwise(client: Client, protocol: int) -> None:
    client.call("HELLO", protocol)
    keys = []
    values = []
    for number in range(3):
        key, value = make_record(bytes([number]) * 32, body_bytes=SMALL << number)
        keys.append(key)
        values.append(value)
        client.call("SET", key, value)
    client.call("SET", "plain", "value")
    client.call("SET", storage_key(b"z" * 32), "no record under a chunk's key")
    reply = client.call("KV.META", keys[0], "absent", keys[2], "plain", storage_key(b"z" * 32), keys[1], keys[0])
    heads = [record.parse_header(value).header_length for value in values]
    expected = [[len(value), value[:head]] for value, head in zip(values, heads, strict=True)]
    assert reply == [expected[0], None, expected[2], None, None, expected[1], expected[0]]
    assert record.parse_header(reply[0][1]).record_length == len(values[0])


def test_kv_meta_needs_a_key_and_counts_as_a_use(client: Client) -> None:
    assert client.call("KV.META") == b"ERR wrong number of arguments for 'kv.meta' command"
    before = client.info("stats")
    key, value = make_record(b"a" * 32)
    client.call("SET", key, value)
    client.call("KV.META", key, "absent")
    after = client.info("stats")
    assert int(after["keyspace_hits"]) - int(before["keyspace_hits"]) == 1
    assert int(after["keyspace_misses"]) - int(before["keyspace_misses"]) == 1

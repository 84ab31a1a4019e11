"""A volume on a simulated device: what is acknowledged stays, what is full says so, what fails is an error."""

from volume_support import Store, device_of

KEY = bytes([7]) * 32


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_a_value_is_read_back_after_a_restart() -> None:
    store = Store(device_of())
    store.put(KEY, b"value" * 1000, what="put")
    store.until(lambda: store.settled)
    assert store.settled == [("put", None)]
    assert store.get(KEY) == b"value" * 1000
    assert store.restarted().get(KEY) == b"value" * 1000


def test_removed_stays_removed() -> None:
    store = Store(device_of())
    store.put(KEY, b"value")
    store.drain()
    store.remove(KEY)
    store.barrier("removed")
    store.until(lambda: ("removed", None) in store.settled)
    assert store.crashed().get(KEY) is None


def test_many_writers_share_one_group() -> None:
    store = Store(device_of())
    for number in range(50):
        store.put(key(number), b"x" * 100, what=number)
    store.drain()
    assert len(store.settled) == 50
    assert store.volume.statistics().log_groups <= 3
    again = store.restarted()
    assert all(again.get(key(number)) == b"x" * 100 for number in range(50))


def test_the_log_wraps_past_snapshots_and_nothing_is_lost() -> None:
    store = Store(device_of())
    for turn in range(300):
        assert store.put(key(turn % 40), bytes([turn % 251]) * 500) is not None
        store.drain()
    statistics = store.volume.statistics()
    assert statistics.snapshots > 3
    again = store.restarted()
    assert again.volume.report.snapshot_records
    assert not again.volume.report.notes
    for number in range(40):
        last = max(turn for turn in range(300) if turn % 40 == number)
        assert again.get(key(number)) == bytes([last % 251]) * 500
    assert again.volume.free_blocks == again.volume.data_blocks - 40

"""The engine that keeps values in files: as every engine, and what is left of it after its end."""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_conformance import EngineConformance
from engine_driver import Clock, Driver
from machine import NEVER_S, wait_for
from storage_support import Child, Client, make_record
from test_io_threads import work_against_a_model

from shadowserve.errors import ConfigurationError
from shadowserve.native import object_bytes
from shadowserve.pool.contract import Engine
from shadowserve.pool.terms import KEY_BYTES_MAX
from storage_kv.engines.filesystem import FilesystemEngine

ATTRIBUTES_BYTES = 48
BUDGET = 1 << 26


class TestFilesystemEngine(EngineConformance):
    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.engines = 0

    def cost(self, key: bytes, size: int) -> int:
        return object_bytes(size, bytes(ATTRIBUTES_BYTES) + key)

    def make(self, budget_bytes: int, clock_ms: Callable[[], int]) -> Engine:
        self.engines += 1
        return FilesystemEngine(self.folder / f"{self.engines}", budget_bytes, clock_ms)


def opened(folder: Path, clock: Clock, budget_bytes: int = BUDGET) -> Driver:
    return Driver(FilesystemEngine(folder, budget_bytes, clock))


def object_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "objects").rglob("*") if path.is_file() and len(path.suffix) == 17]


def test_everything_is_there_again(tmp_path: Path) -> None:
    clock = Clock()
    first = opened(tmp_path, clock)
    one = first.call(first.engine.tenant, "one")
    value = bytes(range(256)) * 5000
    parent = b"p" * 32
    first.put(b"kv:" + parent.hex().encode(), b"parent", head_bytes=3)
    first.put(b"kv:" + (b"c" * 32).hex().encode(), value, head_bytes=7, parent=parent, expires_at_ms=clock.now_ms + 100)
    first.put(b"a", b"old")
    first.put(b"a", b"new", one)
    first.put(b"a", b"newer")
    first.put(b"gone", b"x")
    first.put(b"expires", b"x")
    first.put(b"k" * KEY_BYTES_MAX, b"")
    assert first.remove(b"gone") and first.set_expiry(b"expires", clock.now_ms + 50)
    assert first.pin(b"a", clock.now_ms + 1000)
    before = first.statistics()
    first.stop()

    again = opened(tmp_path, clock)
    assert again.call(again.engine.tenant, "one") == one and again.call(again.engine.tenant, "two") not in (0, one)
    assert again.count() == 5 and again.value(b"a") == b"newer" and again.value(b"a", tenant=one) == b"new"
    assert again.value(b"kv:" + (b"c" * 32).hex().encode()) == value and again.value(b"k" * KEY_BYTES_MAX) == b""
    item = again.peek(b"kv:" + (b"c" * 32).hex().encode())
    assert item is not None and (item.head_bytes, item.expires_at_ms) == (7, clock.now_ms + 100)
    after = again.statistics()
    assert (after.keys, after.used_bytes, after.records, after.pinned_keys, after.expiring_keys) == (
        *(before.keys, before.used_bytes, before.records, before.pinned_keys, before.expiring_keys),
    )
    clock.now_ms += 60
    again.stop()
    third = opened(tmp_path, clock)
    assert third.peek(b"expires") is None and third.count() == 4
    third.put(b"a", b"newest")
    third.stop()
    fourth = opened(tmp_path, clock)
    assert fourth.value(b"a") == b"newest"
    fourth.stop()


def test_the_oldest_go_when_the_budget_is_smaller_than_before(tmp_path: Path) -> None:
    clock = Clock()
    first = opened(tmp_path, clock)
    for number in range(10):
        first.put(b"%d" % number, b"x" * 1000)
    first.stop()
    again = opened(tmp_path, clock, 4 * 4096)
    again.settle(again.call(again.engine.barrier))
    assert again.keys() == {b"6", b"7", b"8", b"9"} and len(object_files(tmp_path)) == 4
    again.stop()


@pytest.mark.parametrize("place", [0, 100, 2048 + 5000, -1, "cut", "gone"])
def test_a_file_that_is_not_what_was_written_is_a_miss(tmp_path: Path, place: int | str) -> None:
    clock = Clock()
    engine = opened(tmp_path, clock)
    engine.put(b"a", bytes(range(256)) * 400)
    (path,) = object_files(tmp_path)
    data = bytearray(path.read_bytes())
    if place == "gone":
        path.unlink()
    elif place == "cut":
        path.write_bytes(data[:5000])
    else:
        assert isinstance(place, int)
        data[place] ^= 1
        path.write_bytes(data)
    if place == -1:  # padding is nobody's value
        assert engine.value(b"a") is not None
    else:
        assert engine.value(b"a") is None and engine.peek(b"a") is None
        assert engine.statistics().lost_keys == 1
        engine.settle(engine.call(engine.engine.barrier))
        assert not object_files(tmp_path)
    engine.stop()


def test_what_a_crash_leaves_behind_goes_at_the_next_start(tmp_path: Path) -> None:
    clock = Clock()
    engine = opened(tmp_path, clock)
    engine.put(b"a", b"first")
    (path,) = object_files(tmp_path)
    first = path.read_bytes()
    engine.put(b"a", b"second")
    engine.settle(engine.call(engine.engine.barrier))
    engine.stop()
    path.write_bytes(first)  # the older generation, not yet removed
    for name in ("x.new", "junk", path.name + ".new", "0" * 64 + ".0000000000000001.changed"):
        (path.parent / name).write_bytes(first[:100])
    (path.parent / ("0" * 64 + ".0000000000000001")).write_bytes(first)  # sound, and not where it belongs
    again = opened(tmp_path, clock)
    assert again.value(b"a") == b"second" and again.count() == 1
    again.stop()
    assert len(list(path.parent.iterdir())) == 1


def test_a_write_that_fails_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    engine = opened(tmp_path, Clock())
    (tmp_path / "objects").rename(tmp_path / "elsewhere")
    error = engine.put_soon(b"a", b"x").wait()
    assert isinstance(error, OSError) and "writing 1 bytes" in str(error)
    assert engine.peek(b"a") is None and engine.statistics().failed_writes == 1
    (tmp_path / "elsewhere").rename(tmp_path / "objects")
    engine.put(b"a", b"y")
    assert engine.value(b"a") == b"y"
    engine.stop()


def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    engine = opened(tmp_path, Clock())
    with pytest.raises(ConfigurationError, match="another server uses it"):
        opened(tmp_path, Clock())
    engine.stop()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="choose a folder"):
        opened(tmp_path / "file", Clock())


def test_acknowledged_writes_outlive_a_killed_server(start: Callable[..., Child], tmp_path: Path) -> None:
    flags = ("--engine", "filesystem", "--filesystem-path", str(tmp_path))
    child = start(*flags)
    key, record = make_record(b"a" * 32, body_bytes=3 << 20)
    with child.client() as client:
        assert client.call("SET", key, record) == b"OK" == client.call("SET", "a", "x", "EX", 1000)
        assert client.call("SET", "b", "x") == b"OK" and client.call("DEL", "b") == 1
        assert client.call("EXPIRE", "a", 500) == 1
    child.stop(signal.SIGKILL)
    with start(*flags).client() as client:
        assert client.call("GET", key) == record and client.call("EXISTS", "b") == 0
        assert 0 < int(str(client.call("TTL", "a"))) <= 500
        (meta,) = client.call("KV.META", key)  # type: ignore[misc]
        assert meta[0] == len(record)  # type: ignore[index]


def test_clients_at_once_each_see_their_own_writes(start: Callable[..., Child], tmp_path: Path) -> None:
    child = start("--engine", "filesystem", "--filesystem-path", str(tmp_path), "--memory-budget-bytes", "1 GiB")
    clients = [child.client() for _ in range(4)]
    with ThreadPoolExecutor(len(clients)) as pool:
        works = [
            pool.submit(work_against_a_model, client, f"client{number}", number, 40)
            for number, client in enumerate(clients)
        ]
        for done in works:
            done.result()
    info = clients[0].info()
    assert info["lost_values"] == "0" and info["protocol_errors"] == "0"
    assert clients[0].call("FLUSHALL") == b"OK" and clients[0].info()["used_memory"] == "0"
    assert not object_files(tmp_path)  # answered when the files are gone
    assert child.stop() == 0


def test_what_was_acknowledged_before_a_signal_is_there_after_it(start: Callable[..., Child], tmp_path: Path) -> None:
    flags = ("--engine", "filesystem", "--filesystem-path", str(tmp_path), "--shutdown-timeout-s", str(NEVER_S))
    child = start(*flags)
    acknowledged: list[str] = []

    def write_on(number: int, client: Client) -> None:
        with contextlib.suppress(ConnectionError, EOFError):
            for step in itertools.count():
                if client.call("SET", f"{number}:{step}", f"{number}:{step}" * 1000) == b"OK":
                    acknowledged.append(f"{number}:{step}")

    writers = [threading.Thread(target=write_on, args=(number, child.client())) for number in range(4)]
    for writer in writers:
        writer.start()
    wait_for(lambda: len(acknowledged) > 50)
    assert child.stop(signal.SIGTERM) == 0
    for writer in writers:
        writer.join()
    with start(*flags).client() as client:
        assert all(client.call("GET", key) == key.encode() * 1000 for key in acknowledged)


def test_the_engine_filesystem_needs_a_folder(start: Callable[..., Child]) -> None:
    with pytest.raises(AssertionError, match="filesystem_path"):
        start("--engine", "filesystem")


def test_clients_that_do_not_take_what_they_asked_for_hold_no_more_than_so_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage_kv.engines.filesystem._READING_BYTES_MAX", 250_000)
    driver = opened(tmp_path, Clock())
    for number in range(5):
        driver.put(b"%d" % number, b"%d" % number * 100_000)
    readings = [reading for number in range(5) if (reading := driver.open(b"%d" % number)) is not None]
    assert [reading.wait() for reading in readings[:2]] == [b"0" * 100_000, b"1" * 100_000]
    assert [reading.finished for reading in readings[2:]] == [False] * 3
    for number, reading in enumerate(readings):  # each that is released makes room for another
        assert reading.wait() == b"%d" % number * 100_000
        reading.release()
    object_files(tmp_path)[0].write_bytes(b"")
    assert [driver.value(b"%d" % number) is None for number in range(5)].count(True) == 1
    assert driver.engine._reading_bytes == 0  # type: ignore[attr-defined]
    driver.stop()

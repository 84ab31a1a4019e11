"""Several io threads: concurrent clients against a model, limits over all threads, and stopping under load."""

import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from machine import NEVER_S
from storage_support import TIMEOUT_S, Child, Client, Start

from shadowserve.errors import ConfigurationError
from storage_kv.clients import io_threads
from storage_kv.clients.event_loop import READ, EventLoop
from storage_kv.config import StorageConfig
from storage_kv.server import StorageServer

MIB = 1 << 20
THREADS = 4
KINDS = ("SET", "GET", "GETRANGE", "DEL", "MGET", "STRLEN", "EXISTS", "SET NX")


def value_of(number: int, size: int) -> bytes:
    """Return a value whose every 8 bytes identify it."""
    return (number.to_bytes(8, "big") * (size // 8 + 1))[:size]


def work_against_a_model(client: Client, prefix: str, seed: int, steps: int) -> None:
    """Run random commands on its own keys. Every reply must equal the model's."""
    chosen = random.Random(seed)
    model: dict[str, bytes] = {}
    for step in range(steps):
        key = f"{prefix}:{chosen.randrange(6)}"
        there = model.get(key)
        kind = chosen.choice(KINDS)
        if kind in ("SET", "SET NX"):
            value = value_of(seed << 32 | step, chosen.choice([3, 1000, 20_000, 100_000, MIB, 3 * MIB + 5]))
            answer = client.call("SET", key, value, *(["NX"] if kind == "SET NX" else []))
            kept = kind == "SET NX" and there is not None
            assert answer == (None if kept else b"OK")
            if not kept:
                model[key] = value
        elif kind == "GET":
            assert client.call("GET", key) == there
        elif kind == "GETRANGE":
            first = chosen.randrange(200_000)
            last = first + chosen.randrange(200_000)
            assert client.call("GETRANGE", key, first, last) == (there or b"")[first : last + 1]
        elif kind == "DEL":
            assert client.call("DEL", key) == (model.pop(key, None) is not None)
        elif kind == "MGET":
            others = [f"{prefix}:{number}" for number in range(6)]
            assert client.call("MGET", *others) == [model.get(other) for other in others]
        elif kind == "STRLEN":
            assert client.call("STRLEN", key) == len(there or b"")
        else:
            assert client.call("EXISTS", key) == (there is not None)


def wait_until_nothing_is_held(client: Client) -> None:
    """Wait until the threads have released the sent values."""
    while client.info()["memory_held_bytes"] != "0":
        pass


@pytest.fixture
def start_threaded() -> Iterator[Start]:
    """Start servers with several io threads."""
    with ExitStack() as stack:
        yield lambda *flags: stack.enter_context(Child("--io-threads", str(THREADS), *flags))


@pytest.fixture
def child(start_threaded: Start) -> Child:
    """A server with several io threads."""
    return start_threaded("--memory-budget-bytes", "1 GiB", "--shutdown-timeout-s", str(NEVER_S))


def test_clients_at_once_each_see_their_own_writes_and_nothing_is_left_over(child: Child) -> None:
    clients = [child.client() for _ in range(2 * THREADS)]
    with ThreadPoolExecutor(len(clients)) as pool:
        works = [
            pool.submit(work_against_a_model, client, f"client{number}", number, 60)
            for number, client in enumerate(clients)
        ]
        for done in works:
            done.result()
    with child.client() as client:
        commands = int(client.info()["total_commands_processed"])
        assert commands == 2 * THREADS * 60 + 1
        wait_until_nothing_is_held(client)
        info = client.info()
        assert info["protocol_errors"] == "0" and info["evicted_keys"] == "0"
        assert client.call("FLUSHALL") == b"OK" and client.info()["used_memory"] == "0"


def test_the_budget_holds_whoever_writes_and_only_whole_values_are_read(start_threaded: Start) -> None:
    child = start_threaded("--memory-budget-bytes", "6 MiB")
    wrong: list[object] = []

    def work(number: int) -> None:
        chosen = random.Random(number)
        with child.client() as client:
            for step in range(80):
                key = f"key{chosen.randrange(12)}"  # keys of all threads
                if chosen.random() < 0.5:
                    size = chosen.choice([100, 50_000, MIB, 2 * MIB])
                    answer = client.call("SET", key, value_of(number << 32 | step, size))
                    # A value cannot be evicted while it is sent, so the server may refuse a write.
                    if answer != b"OK" and not str(answer).startswith("b'OOM"):
                        wrong.append(answer)
                else:
                    found = client.call("GET", key)
                    if isinstance(found, bytes) and found != value_of(int.from_bytes(found[:8], "big"), len(found)):
                        wrong.append(key)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert not wrong
    with child.client() as client:
        info = client.info()
        assert int(info["used_memory_peak"]) <= 6 * MIB and int(info["evicted_keys"]) > 0
        client.call("FLUSHALL")
        wait_until_nothing_is_held(client)
        assert client.info()["used_memory"] == "0"


def test_clients_are_dealt_to_the_thread_with_the_fewest(child: Child) -> None:
    clients = [child.client() for _ in range(2 * THREADS)]
    for client in clients:
        client.call("SET", "a", b"x" * MIB)

    def busy_ticks() -> Counter[str]:
        ticks: Counter[str] = Counter()
        for task in child.threads():
            name = (task / "comm").read_text().strip()
            ticks[name] += int((task / "schedstat").read_text().split()[0])
        return ticks

    before = busy_ticks()
    for client in clients:
        client.call("GET", "a")
    after = busy_ticks()
    assert all(after[name] > before[name] for name in after if name.startswith("io-"))
    assert len(child.threads()) >= THREADS


def test_a_signal_under_load_ends_all_threads_with_whole_replies_only(child: Child) -> None:
    value = value_of(7, 2 * MIB)
    clients = [child.client() for _ in range(2 * THREADS)]
    clients[0].call("SET", "a", value)
    reply = b"$%d\r\n%b\r\n" % (len(value), value)
    wrong: list[str] = []
    served = threading.Semaphore(0)

    def read_on(client: Client) -> None:
        found = bytearray()
        try:
            while True:
                client.send("GET", "a")
                if len(found := bytearray(client.receive_raw(len(reply)))) < len(reply):
                    break
                served.release()
        except (BrokenPipeError, ConnectionResetError):
            found = bytearray()
        if found:
            wrong.append(f"{len(found)} bytes of a reply")

    readers = [threading.Thread(target=read_on, args=(client,)) for client in clients]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert served.acquire(timeout=TIMEOUT_S)
    assert child.stop(signal.SIGTERM) == 0
    for reader in readers:
        reader.join()
    assert not wrong
    assert not [line for line in child.log if "ERROR" in line or "Traceback" in line or "cut_off" in line], child.log


def test_an_event_loop_survives_errors_of_its_handlers(caplog: pytest.LogCaptureFixture) -> None:
    loop = EventLoop()
    here, there = socket.socketpair()
    seen: list[bytes] = []

    def on_readable(events: int) -> None:
        assert events & READ
        seen.append(here.recv(100))
        raise RuntimeError("a bug")

    loop.add(here.fileno(), READ, on_readable)
    thread = threading.Thread(target=loop.run)
    thread.start()
    for text in (b"one", b"two"):
        there.send(text)
        while text not in seen:
            pass
    loop.call_threadsafe(lambda: loop.call_soon(loop.stop))
    thread.join(TIMEOUT_S)
    loop.close()
    here.close()
    there.close()
    assert seen == [b"one", b"two"] and caplog.text.count("callback_failed") == 2


@pytest.mark.parametrize(("configured", "cores", "threads"), [(0, 1, 1), (0, 2, 1), (0, 6, 3), (0, 64, 4), (7, 2, 7)])
def test_as_many_threads_as_configured_or_half_of_the_cores_up_to_four(
    monkeypatch: pytest.MonkeyPatch, configured: int, cores: int, threads: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    assert io_threads.threads_for(configured) == threads


async def test_a_start_that_fails_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_second(number: int, *arguments: Any) -> io_threads.IoThread:
        if number == 1:
            raise OSError("no descriptors are left")
        return io_threads.IoThread(number, *arguments)

    monkeypatch.setattr("storage_kv.server.IoThread", break_second)
    with pytest.raises(ConfigurationError, match="cannot start 2 threads: no descriptors are left"):
        await StorageServer(StorageConfig(port=0, io_threads=2)).start()
    assert not [each.name for each in threading.enumerate() if each.name.startswith(("io-", "layers", "verify"))]

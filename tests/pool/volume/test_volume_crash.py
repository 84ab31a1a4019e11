"""Hundreds of crashes at random moments of a seed, checked against a model.

An acknowledged value is present and complete until its replacement is. In between a read finds one of the two, no mix.
"""

import contextlib
import random
from collections import defaultdict

import pytest
from simulated_device import SimulatedDevice
from volume_support import Store, device_of, index_key

from shadowserve.block import OperationKind
from shadowserve.pool.volume.tickets import BusyError, OutOfBudgetError

SEEDS = 200
KEYS = 24


class Model:
    """All changes of each key in order, and the last acknowledged one."""

    def __init__(self) -> None:
        self.done: dict[bytes, list[bytes | None]] = defaultdict(lambda: [None])
        self.acknowledged: dict[bytes, int] = defaultdict(int)

    def do(self, key: bytes, value: bytes | None) -> tuple[bytes, int]:
        self.done[key].append(value)
        return key, len(self.done[key]) - 1

    def settle(self, key: bytes, number: int) -> None:
        self.acknowledged[key] = max(self.acknowledged[key], number)

    def check(self, key: bytes, found: bytes | None) -> None:
        may = self.done[key][self.acknowledged[key] :]
        assert found in may, (key[:4], found and found[:8], [value and value[:8] for value in may])
        self.done[key] = [found]
        self.acknowledged[key] = 0


class Driver:
    """Executes random operations on a store and crashes it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = Store(device_of(seed=seed), seed=seed)
        self.model = Model()
        self.dirty: list[tuple[bytes, int]] = []
        self.keys = [index_key(b"%d" % number) if number % 3 else bytes([number]) * 32 for number in range(KEYS)]
        self.snapshots = 0

    @property
    def device(self) -> SimulatedDevice:
        return self.store.device

    def act(self) -> None:
        chance = self.random.random()
        key = self.random.choice(self.keys)
        with contextlib.suppress(BusyError, OutOfBudgetError):
            if chance < 0.25:
                self.put(key)
            elif chance < 0.32:
                if self.store.remove(key):
                    self.dirty.append(self.model.do(key, None))
            elif chance < 0.34:
                self.store.expire(key, self.random.randrange(1 << 40))
            elif chance < 0.40:
                dirty, self.dirty = self.dirty, []
                self.store.barrier(dirty)
            elif chance < 0.80:
                self.device.complete()
            else:
                self.store.step()
        self.note()

    def put(self, key: bytes) -> None:
        value = self.random.randbytes(8) * self.random.randrange(1, 1200)
        name = b"name of " + key if self.random.random() < 0.3 and key[0] != key[1] else None
        what = key, len(self.model.done[key])
        if self.store.put(key, value, what=[what], name=name) is not None:
            assert self.model.do(key, value) == what

    def note(self) -> None:
        for what, error in self.store.settled:
            assert error is None
            for key, number in what:
                self.model.settle(key, number)
        self.store.settled.clear()

    def crash(self) -> None:
        self.note()
        self.snapshots += self.store.volume.snapshots.completed
        killed = self.random.random() < 0.2
        self.store = self.store.restarted() if killed else self.store.crashed(torn=self.random.random() < 0.7)
        self.dirty = []
        report = self.store.volume.report
        assert not report.log_blocks_damaged and not report.unproven and not report.unnamed and not report.refused
        assert not any("blocks are damaged" in note for note in report.notes)
        for key in self.keys:
            self.model.check(key, self.store.get(key))
            entry = self.store.entry(key)
            if entry is not None and entry.flags & 2:
                assert self.store.names()[0, key] == b"name of " + key
        used = sum(-(-(2048 + entry.length) // 4096) for key in self.keys if (entry := self.store.entry(key)))
        assert self.store.volume.data_blocks - self.store.volume.free_blocks == used


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_a_crash_at_any_moment_keeps_acknowledged_changes_and_tears_nothing(first: int) -> None:
    snapshots = 0
    for seed in range(first, first + 20):
        driver = Driver(seed)
        for _ in range(3):
            driver.device.automatic = False
            for _ in range(driver.random.randrange(20, 500)):
                driver.act()
            driver.crash()
        snapshots += driver.snapshots
    assert snapshots, "the test completed no snapshot, so it tested nothing"


def test_a_value_torn_by_a_crash_does_not_replace_the_old_one() -> None:
    """Symptom: the new value's record survived without its bytes, and both values were absent."""
    cut_short = 0
    for seed in range(60):
        store, key = Store(device_of(seed=seed)), index_key(b"key")
        old, new = b"o" * 9000, b"n" * 9000
        store.keep(key, old, name=b"key")
        store.device.automatic = False
        store.put(key, new, name=b"key")
        for _ in range(3):  # its bytes, and both copies of its record; the flush is not complete
            store.device.complete(lambda operation: operation.kind is OperationKind.WRITE)
            store.step()
        found = store.crashed(torn=False)
        cut_short += found.volume.report.torn
        value = found.get(key)
        assert value in (old, new)
        found = found.crashed(torn=False)
        assert found.get(key) == value, "a repair must last, durable or not"
        found.keep(index_key(b"another"), new)
        assert found.restarted().get(key) == value
    assert cut_short, "the test cut no write short"

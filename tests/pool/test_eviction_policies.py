"""Eviction: a suite for every policy, and the order among entries that waiting requests need."""

import hashlib
import random
from collections.abc import Callable, Iterator

import pytest
from pool_support import start_pool
from store_driver import Driver

from shadowserve.keys import storage_key
from shadowserve.native import ANY, Index, IndexPolicy
from shadowserve.pool.config import PoolConfig
from shadowserve.pool.memory_pool import MemoryPool
from shadowserve.pool.next_use import REQUESTS_MAX, NextUse

KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(300)]
LATER_S = 1_000_000


class Tier:
    """An index within a budget, like a pool's. It gets victims from the policy, and checks them."""

    def __init__(self, policy: IndexPolicy, budget_bytes: int, pinned: set[bytes]) -> None:
        self.index = Index(len(KEYS), policy, seed=2)
        self.pinned = pinned
        self.next_use = NextUse(self.index, lambda tenant, slot: self.index.read(slot).key in pinned)
        self.budget_bytes = budget_bytes
        self.sizes: dict[bytes, int] = {}

    def put(self, key: bytes, size: int) -> bool:
        """Store an absent key. Return True if there was or could be room for it."""
        while sum(self.sizes.values()) + size > self.budget_bytes:
            if self.evict() is None:
                return False
        self.index.insert(1, key, device=255, length=size, now_s=1)
        self.sizes[key] = size
        return True

    def evict(self, sake: str | None = None) -> bytes | None:
        slot = self.next_use.victim(1, sake=sake)
        if not slot:
            return None
        key = self.index.read(slot).key
        assert key not in self.pinned and self.index.find(1, key) == slot
        self.index.evict(slot)
        del self.sizes[key]
        return key

    def use(self, key: bytes) -> None:
        self.index.touch(self.index.find(1, key), 1)

    def pin(self, key: bytes, keep: bool) -> None:
        self.index.pin(self.index.find(1, key), LATER_S if keep else 0)
        (self.pinned.add if keep else self.pinned.discard)(key)


@pytest.fixture(params=list(IndexPolicy), ids=lambda policy: policy.name.lower())
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Tier]]:
    made: list[Tier] = []

    def tier(budget_bytes: int) -> Tier:
        made.append(Tier(request.param, budget_bytes, set()))
        return made[-1]

    yield tier
    for each in made:
        each.index.close()


@pytest.mark.parametrize("seed", range(4))
def test_every_policy_keeps_budget_and_pins_and_evicts_all_else(make: Callable[[int], Tier], seed: int) -> None:
    chance = random.Random(seed)
    tier = make(20_000)
    waiting: list[int] = []
    for _ in range(3_000):
        key = chance.choice(KEYS)
        match chance.randrange(8):
            case 0 | 1 | 2 if key not in tier.sizes:
                assert tier.put(key, chance.randint(1, 1000)) or tier.pinned
            case 3 | 4 if key in tier.sizes:
                tier.use(key)
            case 5 if key in tier.sizes and (key in tier.pinned or len(tier.pinned) < 10):
                tier.pin(key, key not in tier.pinned)
            case 6:
                number = chance.randrange(12)
                tier.next_use.publish(number, 1, chance.sample(KEYS, chance.randint(0, 30)), LATER_S)
                waiting = [each for each in waiting if each != number] + [number]
            case 7 if waiting:
                tier.next_use.withdraw(waiting.pop(chance.randrange(len(waiting))))
                tier.next_use.order(chance.sample(range(12), 12))
        used = sum(tier.sizes.values())
        assert used <= tier.budget_bytes and tier.index.used_bytes(1) == used
    assert len(tier.next_use) == len(waiting)
    while tier.evict() is not None:
        pass
    assert set(tier.sizes) == tier.pinned, "an unpinned key cannot be evicted"


def test_unneeded_entries_are_evicted_first_then_the_last_request_from_its_end(make: Callable[[int], Tier]) -> None:
    tier = make(1 << 30)
    for key in KEYS[:20]:
        tier.put(key, 1)
    tier.next_use.publish("second", 1, KEYS[5:10], LATER_S)
    tier.next_use.publish("first", 1, KEYS[0:7], LATER_S)  # shares two keys
    tier.next_use.order(["first", "never heard of", "second"])
    gone = [tier.evict() for _ in range(20)]
    assert set(gone[:10]) == set(KEYS[10:20])
    assert gone[10:] == [KEYS[9], KEYS[8], KEYS[7], *reversed(KEYS[0:7])]
    assert tier.evict() is None


def test_a_shared_key_is_kept_for_the_earliest_request_that_needs_it(make: Callable[[int], Tier]) -> None:
    tier = make(1 << 30)
    for key in KEYS[:3]:
        tier.put(key, 1)
    tier.next_use.publish("early", 1, [KEYS[0], KEYS[1]], LATER_S)
    tier.next_use.publish("late", 1, [KEYS[0], KEYS[2]], LATER_S)
    assert [tier.evict() for _ in range(2)] == [KEYS[2], KEYS[1]]
    tier.next_use.withdraw("early")  # it runs: the policy may evict its key again, and the keys that only "late" needs
    assert tier.evict() == KEYS[0]


def test_a_request_evicts_neither_its_own_keys_nor_those_of_earlier_requests(make: Callable[[int], Tier]) -> None:
    tier = make(1 << 30)
    for key in KEYS[:6]:
        tier.put(key, 1)
    for number, name in enumerate(["a", "b", "c"]):
        tier.next_use.publish(name, 1, KEYS[2 * number : 2 * number + 2], LATER_S)
    assert [tier.evict("b"), tier.evict("b"), tier.evict("b")] == [KEYS[5], KEYS[4], None]
    assert tier.evict("a") == KEYS[3] and tier.evict("c") is None


def test_an_expired_request_keeps_nothing(make: Callable[[int], Tier]) -> None:
    tier = make(1 << 30)
    tier.put(KEYS[0], 1)
    tier.put(KEYS[1], 1)
    tier.next_use.publish("gone", 1, [KEYS[0]], until_s=50)
    tier.next_use.publish("there", 1, [KEYS[1]], LATER_S)
    slot = tier.index.victim(60)
    assert slot and tier.index.read(slot).key == KEYS[0]


def test_publishing_again_holds_entries_that_came_since(make: Callable[[int], Tier]) -> None:
    tier = make(1 << 30)
    tier.next_use.publish("waits", 1, KEYS[:2], LATER_S)
    tier.put(KEYS[0], 1)
    tier.put(KEYS[9], 1)
    tier.next_use.publish("waits", 1, KEYS[:2], LATER_S)
    tier.use(KEYS[9])
    assert [tier.evict(), tier.evict(), tier.evict()] == [KEYS[9], KEYS[0], None]


def test_pins_of_clients_are_neither_used_nor_ended(make: Callable[[int], Tier]) -> None:
    tier = make(1 << 30)
    for key in KEYS[:2]:
        tier.put(key, 1)
    tier.pin(KEYS[0], True)
    tier.next_use.publish("r", 1, KEYS[:2], LATER_S)
    tier.pin(KEYS[1], True)  # pinned while a request waits for it
    tier.next_use.withdraw("r")
    assert tier.evict() is None
    tier.pin(KEYS[0], False)
    assert tier.evict() == KEYS[0]


def test_a_victim_is_of_the_given_device_and_tenant() -> None:
    index = Index(10, IndexPolicy.LRU, seed=1)
    next_use = NextUse(index)
    for tenant in (1, 2):
        for number, key in enumerate(KEYS[:4]):
            index.insert(tenant, key, device=number % 2, length=1, now_s=1)
        next_use.publish(tenant, tenant, KEYS[:4], LATER_S)
    found = [index.read(next_use.victim(1, device=0, tenant=1)).key]
    index.evict(index.find(1, found[0]))
    found.append(index.read(next_use.victim(1, device=1, tenant=1)).key)
    assert found == [KEYS[2], KEYS[3]]
    assert index.read(next_use.victim(1, device=1)).tenant == 1  # its hold has ended; next is the last request's key
    index.evict(index.find(1, KEYS[3]))
    assert index.read(next_use.victim(1)).tenant == 2
    index.close()


def test_requests_beyond_the_limit_are_refused() -> None:
    index = Index(10, IndexPolicy.LRU, seed=1)
    next_use = NextUse(index)
    assert all(next_use.publish(number, 0, [], LATER_S) for number in range(REQUESTS_MAX))
    assert not next_use.publish("one more", 0, [], LATER_S) and next_use.publish(5, 0, [], LATER_S)
    assert len(next_use) == REQUESTS_MAX and next_use.victim(1, device=ANY) == 0
    index.close()


@pytest.mark.parametrize("kind", ["memory", "device"])
def test_a_pool_keeps_needed_entries_and_evicts_the_last_requests(kind: str) -> None:
    if kind == "memory":
        pool = Driver(MemoryPool(PoolConfig(memory_budget_bytes=1 << 20)))
    else:
        pool, _ = start_pool(options=[{"bytes_max": 1 << 20}])
    keys = [storage_key(key) for key in KEYS]
    for key in keys[:40]:
        pool.put(key, b"x" * 10_000)
    for name, needed in (("next", KEYS[:20]), ("last", KEYS[20:40])):
        pool.call(pool.store.next_use.publish, name, 0, needed, 1 << 31)
    for key in keys[40:240]:  # twice the room
        pool.put(key, b"x" * 10_000)
    assert all(pool.peek(key) is not None for key in keys[:40])
    pool.put(b"late 0", b"y" * 700_000)
    assert all(pool.peek(key) is not None for key in keys[:20])
    assert any(pool.peek(key) is None for key in keys[20:40])
    assert pool.peek(keys[20]) is not None or pool.peek(keys[39]) is None  # from its end
    for name in ("next", "last"):
        pool.call(pool.store.next_use.withdraw, name)
    pool.put(b"late 1", b"y" * 1_000_000)
    assert sum(pool.peek(key) is not None for key in keys) < 5

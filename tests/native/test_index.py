"""The index of stored objects and the allocator of blocks, through Python. native/tests/test_index.c has the rest."""

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shadowserve import native
from shadowserve.errors import NativeError
from shadowserve.native import ANY, NO_PARENT, Extents, Index, IndexEntry, IndexPolicy, RecordFlag, RecordKind

KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(24)]
DEVICES = 2
TENANTS = 2
OBJECTS_MAX = 16
# No key is evicted while its child is present. So a parent must not be its own descendant: it comes first.
numbers = st.integers(0, len(KEYS) - 1)
tenants = st.integers(0, TENANTS - 1)


class LruModel(RuleBasedStateMachine):
    """LRU with the prefix rule: one list for each tenant and device, the victim first."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(OBJECTS_MAX, IndexPolicy.LRU, seed=7)
        self.now_s = 100
        self.objects: dict[tuple[int, int], IndexEntry] = {}
        self.queues: dict[tuple[int, int], list[int]] = {
            (tenant, device): [] for tenant in range(TENANTS) for device in range(DEVICES)
        }
        self.children: dict[tuple[int, int], list[int]] = {}

    def teardown(self) -> None:
        self.index.close()

    def _tick(self) -> int:
        self.now_s += 1
        return self.now_s

    def _forget(self, tenant: int, number: int) -> None:
        entry = self.objects.pop((tenant, number))
        self.queues[tenant, entry.device].remove(number)
        self._unlink(tenant, number)

    def _unlink(self, tenant: int, number: int) -> None:
        for siblings in self.children.values():
            if (tenant << 16 | number) in siblings:
                siblings.remove(tenant << 16 | number)

    @rule(tenant=tenants, number=numbers, device=st.integers(0, DEVICES - 1), length=st.integers(0, 1 << 24))
    def put(self, tenant: int, number: int, device: int, length: int) -> None:
        """Put an object into the index, as a part of a chain of three."""
        now_s = self._tick()
        parent = KEYS[number - 1] if number % 3 else native.NO_PARENT
        if parent != native.NO_PARENT and (tenant, number - 1) not in self.objects:
            return  # the C tests cover the place of an absent parent
        arguments = {"device": device, "length": length, "flags": RecordFlag.RECORD, "generation": now_s}
        if len(self.objects) == OBJECTS_MAX and (tenant, number) not in self.objects:
            with pytest.raises(NativeError, match="of at most 16"):
                self.index.insert(tenant, KEYS[number], now_s=now_s, parent=parent, **arguments)
            return
        slot = self.index.insert(tenant, KEYS[number], now_s=now_s, parent=parent, **arguments)
        known = (tenant, number) in self.objects
        if known:
            self.queues[tenant, self.objects[tenant, number].device].remove(number)
        self.objects[tenant, number] = self.index.read(slot)
        assert self.objects[tenant, number].parent == parent
        self.queues[tenant, device].append(number)
        if parent != native.NO_PARENT and not known:
            self.children.setdefault((tenant, number - 1), []).append(tenant << 16 | number)

    @rule(tenant=tenants, number=numbers)
    def touch(self, tenant: int, number: int) -> None:
        """Use an object."""
        now_s = self._tick()
        slot = self.index.find(tenant, KEYS[number])
        assert bool(slot) == ((tenant, number) in self.objects)
        entry = self.objects.get((tenant, number))
        assert self.index.get(tenant, KEYS[number]) == (None if entry is None else (slot, entry))
        if entry is not None:
            if now_s % 2:
                self.index.touch(slot, now_s)
            else:
                assert self.index.get(tenant, KEYS[number], now_s) == (slot, entry)
            self.objects[tenant, number] = entry._replace(accessed_s=now_s)
            self.queues[tenant, entry.device].remove(number)
            self.queues[tenant, entry.device].append(number)

    @rule(tenant=tenants, number=numbers)
    def remove_a_leaf(self, tenant: int, number: int) -> None:
        """Remove an object without children."""
        if (tenant, number) in self.objects and not self.children.get((tenant, number)):
            self.index.remove(self.index.find(tenant, KEYS[number]))
            self._forget(tenant, number)

    @rule(tenant=st.integers(-1, TENANTS - 1), device=st.integers(-1, DEVICES - 1))
    def evict(self, tenant: int, device: int) -> None:
        """Evict the model's victim."""
        now_s = self._tick()
        slot = self.index.victim(now_s, device=device, tenant=tenant)
        tails = [
            (self.objects[owner, queue[0]].accessed_s, (owner, home), queue[0])
            for (owner, home), queue in self.queues.items()
            if queue and tenant in (native.ANY, owner) and device in (native.ANY, home)
        ]
        if not tails:
            assert slot == 0
            return
        entry = self.index.read(slot)
        # Of several queues, the victim is the one with the oldest last use; the order of equal ones is not defined.
        oldest = min(tails)[0]
        expected = {}
        for accessed_s, (owner, home), number in tails:
            if accessed_s == oldest:
                expected[owner, self._leaf_below(owner, number)] = (owner, home), number
        found = entry.tenant, KEYS.index(entry.key)
        assert found in expected
        (owner, home), number = expected[found]
        while children := self.children.get((owner, number)):
            number = children[-1] & 0xFFFF
            if self.objects[owner, number].device == home:
                self.queues[owner, home].remove(number)
                self.queues[owner, home].insert(0, number)
        self.index.evict(slot)
        self._forget(*found)
        assert self.index.ghost(entry.tenant, entry.key)

    def _leaf_below(self, tenant: int, number: int) -> int:
        while children := self.children.get((tenant, number)):
            number = children[-1] & 0xFFFF
        return number

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        """Compare all fields."""
        for (tenant, number), entry in self.objects.items():
            assert self.index.read(self.index.find(tenant, KEYS[number])) == entry
        for tenant in (native.ANY, *range(TENANTS)):
            for device in (native.ANY, *range(DEVICES)):
                matching = [
                    entry
                    for entry in self.objects.values()
                    if tenant in (native.ANY, entry.tenant) and device in (native.ANY, entry.device)
                ]
                size = sum(entry.blocks for entry in matching) * 4096
                assert self.index.totals(tenant, device) == (len(matching), size, len(matching), 0, 0)


LruModel.TestCase.settings = settings(max_examples=60, stateful_step_count=60)
TestLru = LruModel.TestCase


@pytest.fixture(params=list(IndexPolicy), ids=lambda policy: policy.name.lower())
def index(request: pytest.FixtureRequest) -> Iterator[Index]:
    """Create an index of either policy."""
    made = Index(1000, request.param)
    yield made
    made.close()


def test_a_record_has_the_same_bytes_by_struct_numpy_and_c(index: Index) -> None:
    assert native.INDEX_RECORD_DTYPE.itemsize == 128
    slot = index.insert(
        0x1234,
        KEYS[1],
        device=3,
        extent=0x1020304,
        length=70_000,
        header_length=2048,
        flags=RecordFlag.RECORD | RecordFlag.NAMED,
        name_blocks=native.blocks_of(70_000, 5000) - native.blocks_of(70_000),
        expires_at_ms=1 << 41,
        pinned_until_s=77,
        generation=0xFFFFFFFE,
        parent=KEYS[0],
        now_s=99,
    )
    entry = index.read(slot)
    records = np.zeros(4, native.INDEX_RECORD_DTYPE)
    assert index.dump(0, records) == (0, 1)
    assert records[0].tobytes() == entry.pack() and IndexEntry.unpack(entry.pack()) == entry
    assert entry.blocks == native.blocks_of(70_000, 5000) == native.object_bytes(70_000, bytes(5000)) // 4096
    assert {name: records[0][name].tolist() for name in ("kind", "tenant", "extent", "generation", "accessed_s")} == {
        "kind": RecordKind.PUT,
        "tenant": 0x1234,
        "extent": 0x1020304,
        "generation": 0xFFFFFFFE,
        "accessed_s": 99,
    }


def test_a_slot_holds_an_object_until_it_is_put_anew(index: Index) -> None:
    slot = index.insert(0, KEYS[0], device=0, length=1, now_s=1, generation=7)
    assert index.holds(slot, KEYS[0], 7)
    assert not index.holds(slot, KEYS[0], 8) and not index.holds(slot, KEYS[1], 7)


def test_a_slot_without_an_object_is_nothing(index: Index) -> None:
    slot = index.insert(0, KEYS[0], device=0, length=1, now_s=1)
    index.remove(slot)
    for nothing in (0, slot, 1 << 31):
        index.remove(nothing)
        index.evict(nothing)
        index.touch(nothing, 1)
        index.pin(nothing, 5)
        index.set_expiry(nothing, 5)
        with pytest.raises(KeyError):
            index.read(nothing)
        assert not index.holds(nothing, KEYS[0], 0)
    assert len(index) == 0 and index.scan(ANY, 0, 9, 1 << 30) == (0, []) and index.victim(9) == 0


def test_an_object_that_no_log_may_hold_is_refused(index: Index) -> None:
    with pytest.raises(NativeError, match="putting an object"):
        index.insert(0, KEYS[0], device=0, length=10, header_length=11, now_s=1)
    with pytest.raises(ValueError, match="32 bytes"):
        index.find(0, b"short")
    with pytest.raises(NativeError, match="making an index for 0 objects"):
        Index(0)


def test_many_keys_are_found_by_one_call(index: Index) -> None:
    slots = [index.insert(1, key, device=0, length=1, now_s=1) for key in KEYS[::2]]
    assert index.find_many(1, b"".join(KEYS)).tolist() == [slot for slot in slots for slot in (slot, 0)][: len(KEYS)]
    assert not index.find_many(0, b"".join(KEYS)).any()


def test_objects_of_a_device_that_overlap_leave_the_later_one() -> None:
    index, extents = Index(10), Extents(100)
    for number, (extent, generation) in enumerate([(0, 1), (2, 3), (3, 2), (9, 1), (99, 1)]):
        index.insert(0, KEYS[number], device=0, extent=extent, length=8192, generation=generation, now_s=1)
    assert index.reserve(0, extents) == 3
    kept = {number for number in range(5) if index.find(0, KEYS[number])}
    assert kept == {1, 3} and extents.free_blocks == 94 and extents.allocate(3) == 5
    index.close()
    extents.close()


def hits(policy: IndexPolicy) -> int:
    """Return the number of hits of 60,000 requests in a cache of 500 objects. Half of the requests never repeat."""
    index = Index(500, policy, seed=3)
    random = np.random.default_rng(5)
    popular = random.zipf(1.2, 30_000) % 5000
    count = 0
    for number, key_number in enumerate(popular.tolist()):
        for key in (hashlib.sha256(b"%d" % key_number).digest(), hashlib.sha256(b"once %d" % number).digest()):
            if slot := index.find(0, key):
                index.touch(slot, number)
                count += 1
                continue
            if len(index) == 500:
                index.evict(index.victim(number))
            index.insert(0, key, device=0, length=1, now_s=number)
    index.close()
    return count


def test_s3_fifo_keeps_what_is_used_again_while_others_come_once() -> None:
    lru, s3_fifo = hits(IndexPolicy.LRU), hits(IndexPolicy.S3FIFO)
    assert s3_fifo > lru * 1.05, (lru, s3_fifo)


def test_a_scan_returns_what_stays_exactly_once_and_depends_on_the_tenants_own_keys_alone() -> None:
    def keys_of(
        index: Index, tenant: int, change: Callable[[int], None], lines: int = 50
    ) -> tuple[list[bytes], list[int]]:
        cursor, keys, cursors = 0, [], []
        while True:
            cursor, slots = index.scan(tenant, cursor, 7, lines)
            keys += [index.read(slot).key for slot in slots]
            cursors.append(cursor)
            if not cursor:
                return keys, cursors
            change(len(cursors))

    for count in (300, 6_000):  # few keys are found by the tenant's lists, many by the table
        index = Index(40_000, seed=1)
        own = [hashlib.sha256(b"%d" % number).digest() for number in range(count)]
        for key in own:
            index.insert(3, key, device=0, length=1, now_s=1)
        alone = keys_of(index, 3, lambda step: None)
        assert sorted(alone[0]) == sorted(own)

        def disturb(step: int, index: Index = index) -> None:
            key = hashlib.sha256(b"other%d" % step).digest()
            index.insert(4, key, device=1, length=1, now_s=1)
            index.remove(index.find(4, hashlib.sha256(b"other%d" % (step - 3)).digest()))

        for number in range(5_000):
            index.insert(5, hashlib.sha256(b"more%d" % number).digest(), device=2, length=1, now_s=1)
        assert keys_of(index, 3, disturb) == alone
        gone = set(own[::3])
        for key in gone:
            index.remove(index.find(3, key))
        assert [key for key in alone[0] if key not in gone] == keys_of(index, 3, disturb)[0]
        everybody = keys_of(index, ANY, lambda step: None, lines=3)[0]
        assert len(everybody) == len(set(everybody)) == len(index)
        assert index.scan(3, 1 << 63, 0, 10) == (0, []) and index.scan(9, 0, 10, 10) == (0, [])
        index.close()


def test_what_pinned_objects_descend_from_goes_when_nothing_else_may() -> None:
    index = Index(1_000, seed=1)
    keys = [bytes([number + 1]) * 32 for number in range(20)]
    for number, key in enumerate(keys):
        index.insert(1, key, device=0, length=1, now_s=number, parent=keys[number - 1] if number else NO_PARENT)
    index.pin(index.find(1, keys[19]), 1_000)
    gone = set()
    while slot := index.victim(100):
        gone.add(index.read(slot).key)
        index.remove(slot)
    assert gone == set(keys[:19])
    assert index.victim(2_000) == index.find(1, keys[19])


@pytest.mark.parametrize("end", ["absent", "length", "memory", "expired", "a name"])
def test_places_of_a_chain_end_before_the_first_that_cannot_be_read_and_count_as_uses(index: Index, end: str) -> None:
    lengths = list(range(10, 15))
    for number, (key, length) in enumerate(zip(KEYS[:5], lengths, strict=True)):
        odd = number == 3
        index.insert(
            1, key, device=255 if odd and end == "memory" else number, extent=100 + number, length=length,
            now_s=1, generation=200 + number,
            expires_at_ms=9_000 if odd and end == "expired" else 0, name=b"n" if odd and end == "a name" else None,
        )  # fmt: skip
    if end == "absent":
        index.remove(index.find(1, KEYS[3]))
    elif end == "length":
        lengths[3] += 1
    slots = [index.find(1, key) for key in KEYS[:5]]
    places = index.places(1, b"".join(KEYS[:5]), lengths, 9_000)
    assert places == list(zip(slots[:3], (100, 101, 102), (200, 201, 202), (0, 1, 2), strict=True))
    assert [index.read(slot).accessed_s for slot in (*slots[:3], slots[4])] == [9, 9, 9, 1]
    assert index.places(0, b"".join(KEYS[:5]), lengths, 9_000) == index.places(1, b"", [], 9_000) == []
    with pytest.raises(ValueError, match="no 5 index keys"):
        index.places(1, b"".join(KEYS[:4]), lengths, 9_000)

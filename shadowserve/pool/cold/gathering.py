"""Gathers records into objects: records of a partition that follow each other in a chain go into one object.

A record names the previous record of its prompt. It continues the sequence that ends with that one, whichever client
stored it, or begins a new one, as the first record of each segment does. A sequence that is long enough becomes an
object. Sequences that have waited long enough share an object with others of their tenant and partition.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

from shadowserve.placement import partition_of
from shadowserve.pool.types import Address

BACKLOG_MAX: Final = 65_536
"""Most records that wait to be written, as keys without bytes."""


class Batch(NamedTuple):
    """Records of one tenant and partition for one object, in their order."""

    tenant: int
    records: list[tuple[Address, bytes]]


class _Sequence:
    __slots__ = ("bytes", "is_full", "last_s", "partition", "records", "tenant")

    def __init__(self, tenant: int, partition: int) -> None:
        self.tenant = tenant
        self.partition = partition
        self.records: list[tuple[Address, bytes]] = []
        self.bytes = 0
        self.last_s = 0.0
        self.is_full = False

    @property
    def at(self) -> bytes:
        return self.records[-1][1]


class _Waiting:
    """A tenant's sequences: long ones in their order, and the others by their last key, oldest first."""

    __slots__ = ("count", "full", "open", "partitions")

    def __init__(self) -> None:
        self.full: list[_Sequence] = []
        self.open: OrderedDict[bytes, _Sequence] = OrderedDict()
        self.partitions: dict[int, dict[bytes, _Sequence]] = {}  # the same sequences, by partition
        self.count = 0

    def add(self, sequence: _Sequence) -> None:
        self.open[sequence.at] = self.partitions.setdefault(sequence.partition, {})[sequence.at] = sequence

    def remove(self, sequence: _Sequence) -> None:
        del self.open[sequence.at]
        of_partition = self.partitions[sequence.partition]
        del of_partition[sequence.at]
        if not of_partition:
            del self.partitions[sequence.partition]

    def pop(self) -> _Sequence:
        if self.full:
            return self.full.pop(0)
        sequence = next(iter(self.open.values()))
        self.remove(sequence)
        return sequence

    def ripe(self, now_s: float, gather_s: float) -> list[_Sequence]:
        """Return the sequences of a partition that have waited long enough. A clock that was set back ends the waiting.

        They are those of the oldest sequence's partition, oldest first.
        """
        oldest = next(iter(self.open.values()), None)
        of_partition = () if oldest is None else self.partitions[oldest.partition].values()
        return [each for each in of_partition if not 0 <= now_s - each.last_s < gather_s]


class Gathering:
    """Waiting sequences of records; tenants take turns. For one thread at a time."""

    def __init__(self, object_bytes: int, gather_s: float, records_max: int, backlog_max: int = BACKLOG_MAX) -> None:
        """Make objects of about ``object_bytes`` and at most ``records_max`` records."""
        self._object_bytes = object_bytes
        self._gather_s = gather_s
        self._records_max = records_max
        self._backlog_max = backlog_max
        self._tenants: OrderedDict[int, _Waiting] = OrderedDict()  # the next tenant first
        self._sequences: dict[tuple[int, bytes], _Sequence] = {}  # of each waiting record, by tenant and key
        self.waiting = 0  # records in all sequences
        self.dropped = 0  # records of the tenant with most that were left out because too many were waiting

    def add(self, address: Address, key: bytes, parent: bytes, length: int, now_s: float) -> None:
        """Add a record. ``key``: its 32 bytes; ``parent``: those of the previous record, empty for none."""
        tenant = address[0]
        if (tenant, key) in self._sequences:
            return  # it is waiting already; it was evicted and stored again
        own = self._tenants.setdefault(tenant, _Waiting())
        partition = partition_of(key)
        sequence = own.open.get(parent)
        if sequence is not None and sequence.partition == partition:
            own.remove(sequence)
        else:
            sequence = _Sequence(tenant, partition)
        sequence.records.append((address, key))
        sequence.bytes += length
        sequence.last_s = now_s
        self._sequences[tenant, key] = sequence
        own.count += 1
        self.waiting += 1
        if sequence.bytes >= self._object_bytes or len(sequence.records) >= self._records_max:
            sequence.is_full = True
            own.full.append(sequence)
        else:
            own.add(sequence)
        self._bound()

    def _bound(self) -> None:
        while self.waiting > self._backlog_max:
            sequence = max(self._tenants.values(), key=lambda own: own.count).pop()
            self._leave(sequence)
            self.dropped += len(sequence.records)

    def _leave(self, sequence: _Sequence) -> None:
        own = self._tenants[sequence.tenant]
        own.count -= len(sequence.records)
        self.waiting -= len(sequence.records)
        if not own.count:
            del self._tenants[sequence.tenant]
        for address, key in sequence.records:
            self._sequences.pop((address[0], key), None)

    def prioritize(self, tenant: int, key: bytes) -> bool:
        """Make a record's sequence the next of its tenant; return whether the record is waiting."""
        sequence = self._sequences.get((tenant, key))
        if sequence is None:
            return False
        own = self._tenants[tenant]
        if sequence.is_full:
            own.full.remove(sequence)
        else:
            sequence.is_full = True
            own.remove(sequence)
        own.full.insert(0, sequence)
        return True

    def take(self, now_s: float, *, hurry: bool = False) -> Batch | None:
        """Return the next batch; None while all sequences wait for more. ``hurry``: none waits."""
        gather_s = 0.0 if hurry else self._gather_s
        tenant = next((each for each, own in self._tenants.items() if own.full or own.ripe(now_s, gather_s)), None)
        if tenant is None:
            return None
        self._tenants.move_to_end(tenant)
        own = self._tenants[tenant]
        ripe = [] if own.full else own.ripe(now_s, gather_s)
        taken, size, count = ([own.full.pop(0)] if own.full else []), 0, 0
        for sequence in ripe:
            fits = size + sequence.bytes <= self._object_bytes and count + len(sequence.records) <= self._records_max
            if fits or not taken:
                taken.append(sequence)
                size, count = size + sequence.bytes, count + len(sequence.records)
                own.remove(sequence)
        for sequence in taken:
            self._leave(sequence)
        return Batch(tenant, [record for sequence in taken for record in sequence.records])

    def put_back(self, batch: Batch) -> None:
        sequence = _Sequence(batch.tenant, partition_of(batch.records[0][1]))
        sequence.records, sequence.is_full = batch.records, True
        self._sequences.update(((batch.tenant, key), sequence) for _, key in batch.records)
        own = self._tenants.setdefault(batch.tenant, _Waiting())
        own.full.append(sequence)
        own.count += len(sequence.records)
        self.waiting += len(sequence.records)
        self._bound()

    def forget(self, tenant: int | None) -> None:
        for each in list(self._tenants) if tenant is None else [tenant] if tenant in self._tenants else []:
            self.waiting -= self._tenants.pop(each).count
        self._sequences = {at: sequence for at, sequence in self._sequences.items() if sequence.tenant in self._tenants}

"""Distribution over devices: in proportion to their bandwidths, interleaved along each chain of chunks.

The paper's equation 1: a device of bandwidth b gets the share b / sum of all b. Reads measure it: short ones at the
start, then clients' reads of a busy device, since a single read shows its latency, not how many fit in parallel.

All devices deliver a prefix together only if its own chunks are spread in proportion, not only those of the whole pool.
So each chain has an account of the bytes that each device should have got of it and has got. The next chunk goes to the
device with the largest debt in the chain; the debts of the whole pool decide where chains begin, and break ties. This
is the paper's floor and remainder (equation 2) without waiting for a set to be complete.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

BUSY_DEPTH: Final = 4
"""Reads in progress that make a device busy: enough to hide one behind the other on any SSD."""
_WINDOW_BYTES: Final = 64 << 20
"""Bytes of one sample: tens of milliseconds of an SSD, longer than the bursts of throttling and of its cache."""
_WEIGHT: Final = 0.2
"""Weight of a new sample in the average: after three samples, half of a change has arrived."""
_CHANGE_MIN: Final = 0.05
"""Relative change of a bandwidth that changes the shares. Measurements of one device differ by as much."""


class BandwidthMeter:
    """Rate of one device while it is busy, from the times of its reads."""

    __slots__ = ("_busy_ns", "_busy_until_ns", "_bytes", "bytes_per_s", "fixed", "samples")

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.fixed = bytes_per_s is not None  # the rate is configured and never changes
        self.bytes_per_s = float(bytes_per_s or 0)  # decaying average; 0 before the first sample
        self.samples = 0  # number of samples in it
        self._bytes = 0
        self._busy_ns = 0
        self._busy_until_ns = 0

    def note(self, length: int, begin_ns: int, end_ns: int, depth: int) -> None:
        """Count a read of ``length`` bytes that began as one of ``depth`` reads in progress."""
        if self.fixed:
            return
        begins_ns = max(begin_ns, self._busy_until_ns)
        self._busy_until_ns = max(end_ns, self._busy_until_ns)
        if depth < BUSY_DEPTH:
            return
        self._bytes += length
        self._busy_ns += max(end_ns - begins_ns, 0)
        if self._bytes >= _WINDOW_BYTES and self._busy_ns > 0:
            self.sample(self._bytes / self._busy_ns * 1e9)
            self._bytes = self._busy_ns = 0

    def sample(self, bytes_per_s: float) -> None:
        if self.fixed:
            return
        weight = _WEIGHT if self.samples else 1.0
        self.bytes_per_s += weight * (bytes_per_s - self.bytes_per_s)
        self.samples += 1


class BandwidthShares:
    """Computes shares from bandwidths.

    Attributes:
        shares: Shares of the devices, with the sum 1; equal while no bandwidth is known.
    """

    def __init__(self, meters: Sequence[BandwidthMeter]) -> None:
        self.meters = list(meters)
        self._decide()

    def update(self) -> bool:
        """Compute the shares again if a bandwidth has changed enough; return whether it has."""
        for meter, old in zip(self.meters, self._bandwidths, strict=True):
            if abs(meter.bytes_per_s - old) > _CHANGE_MIN * old:
                self._decide()
                return True
        return False

    def _decide(self) -> None:
        self._bandwidths = [meter.bytes_per_s for meter in self.meters]
        known = [value for value in self._bandwidths if value > 0]
        # An unmeasured device counts as the slowest known one: it is used, and thus measured.
        assumed = [value or (min(known) if known else 1.0) for value in self._bandwidths]
        total = sum(assumed)
        self.shares = [value / total for value in assumed] if total else []


_CHAINS_MAX: Final = 4_096
"""Chains with an account: 2 MiB. Beyond that, the chain that was idle longest loses its account."""


class Interleaver:
    """Chooses among devices, which are known by their positions in the list of shares."""

    def __init__(self, shares: Sequence[float]) -> None:
        """The sum of ``shares`` may be any positive number."""
        self.placed_bytes = [0] * len(shares)  # bytes that each device got
        self._owed = [0.0] * len(shares)
        self._chains: OrderedDict[Hashable, list[float]] = OrderedDict()
        self._shares: list[float] = []
        self.set_shares(shares)

    @property
    def shares(self) -> list[float]:
        return list(self._shares)

    def set_shares(self, shares: Sequence[float]) -> None:
        """Change the shares for objects from now on; debts by the old shares are forgotten."""
        if len(shares) != len(self.placed_bytes) or any(share < 0 for share in shares) or not sum(shares):
            raise ValueError(f"{list(shares)} are no shares of {len(self.placed_bytes)} devices")
        total = sum(shares)
        self._shares = [share / total for share in shares]
        self._owed = [0.0] * len(shares)
        self._chains.clear()

    def order(self, size: int, parent: Hashable, available: Sequence[bool]) -> list[int]:
        """Return the available devices, the best one for an object first. ``parent``: name of the previous chunk, or
        a false value."""
        chain = self._chains.get(parent) if parent else None
        owed = self._owed
        gains = self._gains(size, available)
        if chain is None:
            keys = [(owed[device] + gains[device], gains[device]) for device in range(len(owed))]
        else:
            # The pool's debt counts for at most half an object: it breaks ties, and does not change the chain's order.
            bound = size / 2
            keys = [
                (chain[device] + gains[device] + max(-bound, min(bound, owed[device])), gains[device])
                for device in range(len(owed))
            ]
        return sorted((device for device, may in enumerate(available) if may), key=lambda device: keys[device])[::-1]

    def place(self, device: int, size: int, parent: Hashable, key: Hashable, available: Sequence[bool]) -> None:
        """Account for an object ``key`` of ``size`` bytes on ``device``."""
        chain = self._chains.pop(parent, None) if parent else None
        if chain is None:
            chain = [0.0] * len(self._owed)
        for position, gain in enumerate(self._gains(size, available)):
            if available[position]:
                chain[position] += gain
                self._owed[position] += gain
        chain[device] -= size
        self._owed[device] -= size
        self.placed_bytes[device] += size
        self._chains[key] = chain
        if len(self._chains) > _CHAINS_MAX:
            self._chains.popitem(last=False)

    def _gains(self, size: int, available: Sequence[bool]) -> list[float]:
        """Return the additional debt to each device for an object, if it is available."""
        weight = sum(share for share, may in zip(self._shares, available, strict=True) if may) or 1.0
        return [size * share / weight for share in self._shares]

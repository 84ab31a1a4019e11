"""Distribution over devices: in proportion to their bandwidths, interleaved along each chain of chunks.

All devices deliver a prefix together only if its own chunks are spread in proportion, not only those of the whole pool.
So each chain has an account of the bytes that each device should have got of it and has got. The next chunk goes to the
device with the largest debt in the chain; the debts of the whole pool decide where chains begin, and break ties. This
is the paper's floor and remainder (equation 2) without waiting for a set to be complete.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

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
        """Share of each device, with the sum 1."""
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
        weight = sum(share for share, may in zip(self._shares, available, strict=True) if may) or 1.0
        gains = [size * share / weight for share in self._shares]
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
        weight = sum(share for share, may in zip(self._shares, available, strict=True) if may) or 1.0
        for position, may in enumerate(available):
            if may:
                gain = size * self._shares[position] / weight
                chain[position] += gain
                self._owed[position] += gain
        chain[device] -= size
        self._owed[device] -= size
        self.placed_bytes[device] += size
        self._chains[key] = chain
        if len(self._chains) > _CHAINS_MAX:
            self._chains.popitem(last=False)

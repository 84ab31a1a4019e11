"""Which device an object is put on: shares in proportion to bandwidth, interleaved along each chain of chunks.

A prefix comes back from all devices at once only if its own chunks are spread in proportion, not merely those of the
whole pool. Two clients that store in turns would otherwise get one device each. So every chain keeps account of what
each device should have got of it and has got. The next chunk goes to the device that the chain owes most; what the
whole pool owes decides where chains begin, and among equals.

With shares p, a device has got p times the bytes that were placed, give or take little more than one object, in every
chain and in the pool. That is the paper's floor and remainder (equation 2), without waiting for a set to be complete.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

_CHAINS_MAX: Final = 4_096
"""Chains under way at one time that are accounted for: 2 MiB. Of more, the one that stood still longest starts anew."""


class Interleaver:
    """Chooses among devices that are known by their positions in the list of shares.

    Attributes:
        placed_bytes: what each device was given.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        """``shares`` of the devices need not add up to one."""
        self.placed_bytes = [0] * len(shares)
        self._owed = [0.0] * len(shares)
        self._chains: OrderedDict[Hashable, list[float]] = OrderedDict()
        self._shares: list[float] = []
        self.set_shares(shares)

    @property
    def shares(self) -> list[float]:
        """Each device's share of what is placed, together one."""
        return list(self._shares)

    def set_shares(self, shares: Sequence[float]) -> None:
        """Change the shares of what is placed from now on; what was owed by the old ones is forgotten."""
        if len(shares) != len(self.placed_bytes) or any(share < 0 for share in shares) or not sum(shares):
            raise ValueError(f"{list(shares)} are no shares of {len(self.placed_bytes)} devices")
        total = sum(shares)
        self._shares = [share / total for share in shares]
        self._owed = [0.0] * len(shares)
        self._chains.clear()

    def order(self, size: int, parent: Hashable, available: Sequence[bool]) -> list[int]:
        """Return the available devices, the one that an object should go to first. Nothing is accounted yet.

        Args:
            size: bytes of the object.
            parent: what the chunk before it is called, by whoever places; what is false for none.
            available: for each device whether it takes objects now.
        """
        chain = self._chains.get(parent) if parent else None
        owed = self._owed
        weight = sum(share for share, may in zip(self._shares, available, strict=True) if may) or 1.0
        gains = [size * share / weight for share in self._shares]
        if chain is None:
            keys = [(owed[device] + gains[device], gains[device]) for device in range(len(owed))]
        else:
            # What the pool owes counts for at most half an object: it shall settle ties, not undo the chain's order.
            bound = size / 2
            keys = [
                (chain[device] + gains[device] + max(-bound, min(bound, owed[device])), gains[device])
                for device in range(len(owed))
            ]
        return sorted((device for device, may in enumerate(available) if may), key=lambda device: keys[device])[::-1]

    def place(self, device: int, size: int, parent: Hashable, key: Hashable, available: Sequence[bool]) -> None:
        """Account for an object of ``size`` bytes with ``key`` that goes to ``device``; else as for :meth:`order`."""
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

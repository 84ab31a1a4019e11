"""Tenants ranked by their bytes, in classes, so that finding the largest does not take a look at each."""

from collections.abc import Callable
from itertools import islice
from typing import Final

_LOOKS: Final = 16
"""Members of a class that are compared: among as many tenants, the result is exact."""
_CHANGED_MAX: Final = 16
"""Changed tenants that are weighed together."""


class UsageRanking:
    """Classes of weights, each an eighth wider than the one below. A tenant without bytes is in no class."""

    __slots__ = ("several", "_changed", "_class_of", "_classes", "_present", "_weigh", "_weights")

    def __init__(self, weigh: Callable[[int], int]) -> None:
        """``weigh`` returns a tenant's bytes."""
        self.several = False  # more than one tenant had bytes at the last weighing
        self._weigh = weigh
        self._weights: dict[int, int] = {}
        self._class_of: dict[int, int] = {}
        self._classes: dict[int, dict[int, None]] = {}
        self._present = 0  # one bit for each class that has members
        self._changed: set[int] = set()  # since the last weighing

    def note(self, tenant: int) -> None:
        """A tenant's bytes have changed. It is weighed when the ranking is used."""
        self._changed.add(tenant)
        if len(self._changed) > _CHANGED_MAX or tenant not in self._class_of:
            self._settle()

    def _settle(self) -> None:
        for tenant in self._changed:
            self._set(tenant, self._weigh(tenant))
        self._changed.clear()

    def _set(self, tenant: int, weight: int) -> None:
        self._weights[tenant] = weight
        bits = weight.bit_length()
        number = bits << 3 | (weight << 3 >> bits - 1) & 7 if weight > 0 else 0
        old = self._class_of.get(tenant, 0)
        if number == old:
            return
        if old:
            members = self._classes[old]
            del members[tenant]
            if not members:
                self._present &= ~(1 << old)
        if number:
            self._class_of[tenant] = number
            self._classes.setdefault(number, {})[tenant] = None
            self._present |= 1 << number
        else:
            del self._class_of[tenant]
        self.several = len(self._class_of) > 1

    def heaviest_first(self, count: int, total: int) -> list[int]:
        """Return at most ``count`` tenants with more than an equal share of ``total``, the largest of them first."""
        self._settle()
        found: list[int] = []
        share = total // max(len(self._class_of), 1)
        present = self._present
        while present and count > len(found):
            number = present.bit_length() - 1
            present ^= 1 << number
            members = list(islice(self._classes[number], _LOOKS))
            if len(members) > 1:
                members.sort(key=self._weights.__getitem__, reverse=True)
            for tenant in members:
                if self._weights[tenant] <= share or len(found) == count:
                    return found
                found.append(tenant)
        return found

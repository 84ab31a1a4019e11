"""Which tenant has most, without asking each: they are kept in classes by how much they have."""

from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Final, Generic, TypeVar

__all__ = ["Weights"]

H = TypeVar("H", bound=Hashable)

_LOOKS: Final = 16
"""Members of a class that are compared: with so many tenants or fewer the heaviest is found exactly."""


class Weights(Generic[H]):
    """Classes of weights, each an eighth wider than the one below; who weighs nothing is in none."""

    __slots__ = ("_class_of", "_classes", "_present", "_weights")

    def __init__(self) -> None:
        """Make it empty."""
        self._weights: dict[H, int] = {}
        self._class_of: dict[H, int] = {}
        self._classes: dict[int, dict[H, None]] = {}
        self._present = 0  # a bit for each class with members

    def __len__(self) -> int:
        """Return how many weigh anything."""
        return len(self._class_of)

    def set(self, who: H, weight: int) -> None:
        """Say what somebody weighs now."""
        self._weights[who] = weight
        bits = weight.bit_length()
        number = bits << 3 | (weight << 3 >> bits - 1) & 7 if weight > 0 else 0
        old = self._class_of.get(who, 0)
        if number == old:
            return
        if old:
            members = self._classes[old]
            del members[who]
            if not members:
                self._present &= ~(1 << old)
        if number:
            self._class_of[who] = number
            self._classes.setdefault(number, {})[who] = None
            self._present |= 1 << number
        else:
            del self._class_of[who]

    def of(self, who: H) -> int:
        """Return what somebody weighs."""
        return self._weights.get(who, 0)

    def heaviest_first(self, count: int) -> Iterator[H]:
        """Yield at most ``count`` of them, the heaviest first: exactly so among the first 16 of a class."""
        present = self._present
        while present and count > 0:
            number = present.bit_length() - 1
            present ^= 1 << number
            members = list(islice(self._classes[number], _LOOKS))
            if len(members) > 1:
                members.sort(key=self._weights.__getitem__, reverse=True)
            yield from members[:count]
            count -= len(members)

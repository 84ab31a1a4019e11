"""Things in the order of numbers, however many: nothing that is done to them takes longer as there are more."""

from bisect import bisect_left, bisect_right
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_PART_MAX: Final = 1024
"""Of one part; a part is what adding or removing moves about in memory."""


class Ordered(Generic[T]):
    """Things by numbers, each of which is there once."""

    __slots__ = ("_count", "_firsts", "_numbers", "_things")

    def __init__(self) -> None:
        self._firsts: list[int] = []  # the least number of each part
        self._numbers: list[list[int]] = []
        self._things: list[list[T]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, number: int, thing: T) -> None:
        """Add a thing under a number that is not there."""
        self._count += 1
        if self._firsts and number > self._numbers[-1][-1] and len(self._numbers[-1]) < _PART_MAX:  # most often
            self._numbers[-1].append(number)
            self._things[-1].append(thing)
            return
        if not self._firsts:
            self._firsts.append(number)
            self._numbers.append([number])
            self._things.append([thing])
            return
        part = max(bisect_right(self._firsts, number) - 1, 0)
        numbers, things = self._numbers[part], self._things[part]
        if number > numbers[-1]:
            numbers.append(number)
            things.append(thing)
        else:
            at = bisect_left(numbers, number)
            numbers.insert(at, number)
            things.insert(at, thing)
            self._firsts[part] = numbers[0]
        if len(numbers) > _PART_MAX:
            self._split(part)

    def _split(self, part: int) -> None:
        numbers, things = self._numbers[part], self._things[part]
        # What only grows at its end leaves full parts behind.
        at = _PART_MAX if part == len(self._firsts) - 1 else len(numbers) // 2
        self._firsts.insert(part + 1, numbers[at])
        self._numbers.insert(part + 1, numbers[at:])
        self._things.insert(part + 1, things[at:])
        del numbers[at:], things[at:]

    def remove(self, number: int) -> bool:
        """Remove the thing of a number; return whether there was one."""
        part = bisect_right(self._firsts, number) - 1
        if part < 0:
            return False
        numbers = self._numbers[part]
        at = bisect_left(numbers, number)
        if at == len(numbers) or numbers[at] != number:
            return False
        del numbers[at], self._things[part][at]
        self._count -= 1
        if not numbers:
            del self._firsts[part], self._numbers[part], self._things[part]
            return True
        self._firsts[part] = numbers[0]
        if len(numbers) < _PART_MAX // 4:
            self._join(part)
        return True

    def _join(self, part: int) -> None:
        """Put a part that has become small to a neighbour that has room for it."""
        for first in (part - 1, part):
            if 0 <= first < len(self._firsts) - 1:
                numbers, others = self._numbers[first], self._numbers[first + 1]
                if len(numbers) + len(others) <= _PART_MAX // 2:
                    numbers += others
                    self._things[first] += self._things[first + 1]
                    del self._firsts[first + 1], self._numbers[first + 1], self._things[first + 1]
                    return

    def first(self) -> tuple[int, T] | None:
        """Return the least number, and its thing; None where there is nothing."""
        return (self._numbers[0][0], self._things[0][0]) if self._firsts else None

    def page(self, start: int, count: int) -> tuple[int | None, list[T]]:
        """Return at most ``count`` things from the number ``start`` on, and the number behind them; None: no more."""
        found: list[T] = []
        part = max(bisect_right(self._firsts, start) - 1, 0)
        while part < len(self._firsts):
            numbers = self._numbers[part]
            at = bisect_left(numbers, start)
            end = at + count - len(found)
            found += self._things[part][at:end]
            if end < len(numbers):
                return numbers[end], found
            part += 1
        return None, found

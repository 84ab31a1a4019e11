"""Patterns of SCAN, CONFIG GET and users' keys: ``*``, ``?``, ``[ab]``, ``[a-c]``, ``[^a]`` and ``\\`` as in Redis."""

import re
from typing import Final

_ANY: Final = b"[\\x00-\\xff]"


class Glob:
    """A compiled pattern. Matching takes at most pattern times text steps, mostly no more than text."""

    def __init__(self, pattern: bytes, *, ignore_case: bool = False) -> None:
        """Compile ``pattern`` into parts of fixed length between stars, each a sequence of sets of bytes."""
        self._fold = ignore_case
        parts: list[list[bytes]] = [[]]
        pattern = pattern.lower() if ignore_case else pattern
        position = 0
        while position < len(pattern):
            character = pattern[position : position + 1]
            position += 1
            if character == b"*":
                parts += [[]] if parts[-1] or len(parts) == 1 else []
            elif character == b"?":
                parts[-1].append(_ANY)
            elif character == b"[":
                element, position = _read_class(pattern, position)
                parts[-1].append(element)
            else:
                if character == b"\\" and position < len(pattern):
                    character = pattern[position : position + 1]
                    position += 1
                parts[-1].append(re.escape(character))
        self._is_empty = len(parts) == 1 and not parts[0]
        self._length = sum(map(len, parts))  # of the shortest matching text
        self._has_star = len(parts) > 1
        self._first, *middle = (re.compile(b"".join(part)) for part in parts)
        self._last = re.compile(b"".join(parts[-1]))
        self._last_length = len(parts[-1])
        self._middle = middle[:-1]

    def matches(self, text: bytes) -> bool:
        """Return True if all of ``text`` matches. As in Redis, stars alone do not match an empty text."""
        if not text:
            return self._is_empty
        text = text.lower() if self._fold else text
        if not self._has_star:
            return self._first.fullmatch(text) is not None
        found = self._first.match(text)
        if found is None or len(text) < self._length:
            return False
        for part in self._middle:  # the first match leaves most to the other parts
            found = part.search(text, found.end())
            if found is None:
                return False
        begin = len(text) - self._last_length
        return begin >= found.end() and self._last.match(text, begin) is not None


def _read_class(pattern: bytes, position: int) -> tuple[bytes, int]:
    """Parse a set after its ``[``; return it and the position after its ``]``, or the end if there is none."""
    negated = pattern[position : position + 1] == b"^"
    position += negated
    members: set[int] = set()
    while position < len(pattern) and pattern[position] != 0x5D:  # "]"
        if pattern[position] == 0x5C and position + 1 < len(pattern):
            members.add(pattern[position + 1])
            position += 2
        elif pattern[position + 1 : position + 2] == b"-" and position + 2 < len(pattern):
            low, high = sorted((pattern[position], pattern[position + 2]))
            members.update(range(low, high + 1))
            position += 3
        else:
            members.add(pattern[position])
            position += 1
    accepted = set(range(256)) - members if negated else members
    if not accepted:
        return b"(?!)", position + 1
    return b"[%b]" % b"".join(b"\\x%02x" % byte for byte in sorted(accepted)), position + 1

"""Patterns of SCAN, CONFIG GET and users' keys: ``*``, ``?``, ``[ab]``, ``[a-c]``, ``[^a]`` and ``\\`` as in Redis."""

from typing import Final

__all__ = ["Glob"]

_STAR: Final = None
_ANY: Final = frozenset(range(256))


class Glob:
    """A compiled pattern. Matching takes at most pattern times text steps, whatever the pattern."""

    def __init__(self, pattern: bytes, *, ignore_case: bool = False) -> None:
        """Compile ``pattern``: each element is the set of bytes that may stand there, or a star."""
        self._fold = ignore_case
        self._elements: list[frozenset[int] | None] = []
        pattern = pattern.lower() if ignore_case else pattern
        position = 0
        while position < len(pattern):
            character = pattern[position : position + 1]
            position += 1
            if character == b"*":
                if not self._elements or self._elements[-1] is not _STAR:
                    self._elements.append(_STAR)
            elif character == b"?":
                self._elements.append(_ANY)
            elif character == b"[":
                position = self._compile_class(pattern, position)
            else:
                if character == b"\\" and position < len(pattern):
                    character = pattern[position : position + 1]
                    position += 1
                self._elements.append(frozenset(character))

    def _compile_class(self, pattern: bytes, position: int) -> int:
        """Compile what follows a ``[``; return the position behind its ``]``, or the end if it has none."""
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
        self._elements.append(_ANY - members if negated else frozenset(members))
        return position + 1

    def matches(self, text: bytes) -> bool:
        """Return whether the whole of ``text`` fits. On a misfit only the last star needs to take one more byte."""
        text = text.lower() if self._fold else text
        elements = self._elements
        element = position = 0
        star, star_position = -1, 0
        while position < len(text):
            accepted = elements[element] if element < len(elements) else frozenset()
            if accepted is _STAR:
                star, star_position = element, position
                element += 1
            elif text[position] in accepted:
                element += 1
                position += 1
            elif star >= 0:
                star_position += 1
                element, position = star + 1, star_position
            else:
                return False
        return all(rest is _STAR for rest in elements[element:])

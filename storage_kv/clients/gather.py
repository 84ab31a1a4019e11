"""What waits to be sent, as the kernel takes it."""

from collections.abc import Iterable
from typing import Final

from storage_kv.node import Outgoing

_GATHER_PARTS_MAX: Final = 64
"""Buffers in one sendmsg(); far below Linux's 1,024, and enough that the call's own cost vanishes."""


def gather(waiting: Iterable[bytes | Outgoing], offset: int) -> list[bytes | memoryview]:
    """Return the first parts of what waits, less ``offset`` bytes of the first of them that are sent."""
    parts: list[bytes | memoryview] = []
    for part in waiting:
        if isinstance(part, bytes):
            parts.append(memoryview(part)[offset:] if offset else part)
        else:
            rest = part.rest(offset, _GATHER_PARTS_MAX - len(parts))
            parts += rest
            if part.is_layer and sum(map(len, rest)) < part.size - offset:
                break
        offset = 0
        if len(parts) >= _GATHER_PARTS_MAX:
            break
    return parts

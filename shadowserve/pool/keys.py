"""Keys and the 32 bytes that the index knows them by.

A chunk's key is ``kv:`` and 64 hexadecimal digits: those are its 32 bytes. Any other key is known by its SHA-256, and
its text is kept beside, for SCAN and for the log.
"""

import hashlib
from binascii import unhexlify
from contextlib import suppress
from typing import Final

from shadowserve.pool.terms import Address

_PREFIX: Final = b"kv:"
CHUNK_KEY_BYTES: Final = len(_PREFIX) + 64
"""Of a chunk's key."""


ParsedKey = tuple[int, bytes, bytes | None]
"""Whose a key is, what the index calls it, and its text, None for a chunk's."""


def parse_key(address: Address) -> ParsedKey:
    """Return what the index calls an object."""
    tenant, text = address
    if is_chunk_key(text) and text.lower() == text:
        with suppress(ValueError):
            return tenant, unhexlify(text[len(_PREFIX) :]), None
    return tenant, hashlib.sha256(text).digest(), text


def is_chunk_key(text: bytes) -> bool:
    """Return whether a key may be a chunk's: all others are not, which is quickly said."""
    return len(text) == CHUNK_KEY_BYTES and text.startswith(_PREFIX)


def chunk_key(key: bytes) -> bytes:
    """Return the key of a chunk."""
    return _PREFIX + key.hex().encode()

"""Keys, and the 32 bytes that the index has for each.

A chunk's key is ``kv:`` and 64 hexadecimal digits, which are its 32 bytes. Any other key has its SHA-256, and its text
is kept for SCAN and for the log.
"""

import hashlib
from binascii import unhexlify
from contextlib import suppress
from typing import Final

from shadowserve.pool.types import Address

_PREFIX: Final = b"kv:"
CHUNK_KEY_BYTES: Final = len(_PREFIX) + 64
"""Length of a chunk's key."""


ParsedKey = tuple[int, bytes, bytes | None]
"""Tenant, the index's key, and the text; None as the text of a chunk's key."""


def parse_key(address: Address) -> ParsedKey:
    """Return the index's key of an address."""
    tenant, text = address
    if is_chunk_key(text) and text.lower() == text:
        with suppress(ValueError):
            return tenant, unhexlify(text[len(_PREFIX) :]), None
    return tenant, hashlib.sha256(text).digest(), text


def is_chunk_key(text: bytes) -> bool:
    """Return whether a key may be a chunk's, by a quick test."""
    return len(text) == CHUNK_KEY_BYTES and text.startswith(_PREFIX)


def chunk_key(key: bytes) -> bytes:
    """Return the client's key of a chunk."""
    return _PREFIX + key.hex().encode()

"""Keys and the 32 bytes that the index knows them by.

A chunk's key is ``kv:`` and 64 hexadecimal digits: those are its 32 bytes. Any other key is known by its SHA-256, and
its text is kept beside, for SCAN and for the log.
"""

import hashlib
import re
from binascii import unhexlify
from typing import Final, NamedTuple

from shadowserve.pool.terms import Address

__all__ = ["CHUNK_KEY_BYTES", "ParsedKey", "chunk_key", "parse_key"]

_PREFIX: Final = b"kv:"
CHUNK_KEY_BYTES: Final = len(_PREFIX) + 64
"""Of a chunk's key."""
_DIGITS: Final = re.compile(rb"[0-9a-f]{64}")


class ParsedKey(NamedTuple):
    """Whose a key is, what the index calls it, and its text, None for a chunk's."""

    tenant: int
    key: bytes
    name: bytes | None


def parse_key(address: Address) -> ParsedKey:
    """Return what the index calls an object."""
    tenant, text = address
    if len(text) == CHUNK_KEY_BYTES and text.startswith(_PREFIX):
        digits = text[len(_PREFIX) :]
        if _DIGITS.fullmatch(digits):
            return ParsedKey(tenant, unhexlify(digits), None)
    return ParsedKey(tenant, hashlib.sha256(text).digest(), text)


def chunk_key(key: bytes) -> bytes:
    """Return the key of a chunk."""
    return _PREFIX + key.hex().encode()

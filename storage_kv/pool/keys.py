"""Qualified keys and the 32 bytes that the index knows them by.

A chunk's key is ``kv:`` and 64 hexadecimal digits: those are its 32 bytes. Any other key is known by its SHA-256, and
its text is kept beside, for SCAN and for the log.
"""

import hashlib
import re
from binascii import unhexlify
from typing import Final, NamedTuple

from storage_kv.engine import TENANT_BYTES

__all__ = ["CHUNK_KEY_BYTES", "ParsedKey", "chunk_key", "parse_key"]

_PREFIX: Final = b"kv:"
CHUNK_KEY_BYTES: Final = len(_PREFIX) + 64
"""Of a chunk's key, as clients have it."""
_DIGITS: Final = re.compile(rb"[0-9a-f]{64}")


class ParsedKey(NamedTuple):
    """A qualified key: whose it is, what the index calls it, and its text, None for a chunk's."""

    tenant: int
    key: bytes
    name: bytes | None


def parse_key(qualified: bytes) -> ParsedKey:
    """Take a qualified key apart."""
    tenant = (qualified[0] << 8) | qualified[1]
    if len(qualified) == TENANT_BYTES + CHUNK_KEY_BYTES and qualified.startswith(_PREFIX, TENANT_BYTES):
        digits = qualified[TENANT_BYTES + len(_PREFIX) :]
        if _DIGITS.fullmatch(digits):
            return ParsedKey(tenant, unhexlify(digits), None)
    text = qualified[TENANT_BYTES:]
    return ParsedKey(tenant, hashlib.sha256(text).digest(), text)


def chunk_key(key: bytes) -> bytes:
    """Return the client's key of a chunk."""
    return _PREFIX + key.hex().encode()

"""Names of keys and tenants as records of the log, many at a time: a million take about a second either way."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from storage_kv.pool.format import NAME_PIECE_BYTES, RECORD_BYTES, RecordKind, pack_name, unpack_name

__all__ = ["Key", "TextReader", "keys_of", "pack_names"]

Key = tuple[int, bytes]

_DTYPE: Final = np.dtype(
    [
        ("kind", "u1"),
        ("zeros", "u1", 3),
        ("tenant", "<u2"),
        ("piece", "<u2"),
        ("start", "<u4"),
        ("length", "<u4"),
        ("key", "V32"),
        ("text", "V80"),
    ]
)


def keys_of(records: npt.NDArray[Any]) -> list[Key]:
    """Return tenants and keys of records of the index."""
    keys = np.ascontiguousarray(records["key"]).view("V32").reshape(-1)
    return list(zip(records["tenant"].tolist(), keys.tolist(), strict=True))


def pack_names(named: npt.NDArray[Any], names: Mapping[Key, bytes]) -> bytes:
    """Return the NAME records of objects, those without a name left out."""
    found = [(key, name) for key in keys_of(named) if (name := names.get(key)) is not None]
    short = [(key, name) for key, name in found if len(name) <= NAME_PIECE_BYTES]
    records = np.zeros(len(short), _DTYPE)
    records["kind"] = RecordKind.NAME
    records["tenant"] = [tenant for (tenant, _), _ in short]
    records["key"] = np.array([key for (_, key), _ in short], "S32").view("V32") if short else []
    records["text"] = np.array([name for _, name in short], "S80").view("V80") if short else []
    records["piece"] = records["length"] = [len(name) for _, name in short]
    long = [pack_name(RecordKind.NAME, *key, name) for key, name in found if len(name) > NAME_PIECE_BYTES]
    return b"".join([records.tobytes(), *long])


class TextReader:
    """Puts texts together from records that may be anything.

    Attributes:
        names: of named keys.
        tenants: by id.
        notes: of the pool, by name.
        refused: records that cannot be.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.names: dict[Key, bytes] = {}
        self.tenants: dict[int, bytes] = {}
        self.notes: dict[bytes, bytes] = {}
        self.refused = 0
        self._pieces: dict[tuple[RecordKind, int, bytes], dict[int, bytes]] = {}

    def read(self, records: npt.NDArray[Any]) -> None:
        """Take NAME and TENANT records, in the order of the log."""
        found = np.ascontiguousarray(records).view(_DTYPE)
        short = (found["kind"] == RecordKind.NAME) & (found["start"] == 0) & (found["length"] <= NAME_PIECE_BYTES)
        whole = found[short & (found["piece"] == found["length"])]
        keys = zip(whole["tenant"].tolist(), whole["key"].tolist(), strict=True)
        texts = zip(whole["text"].tolist(), whole["length"].tolist(), strict=True)
        self.names.update(zip(keys, (text[:length] for text, length in texts), strict=True))
        content = found[~short | (found["piece"] != found["length"])].tobytes()
        for at in range(0, len(content), RECORD_BYTES):
            self._read(content[at : at + RECORD_BYTES])

    def _read(self, record: bytes) -> None:
        text = unpack_name(record)
        if text is None:
            self.refused += 1
            return
        kind, tenant, key, start, length, piece = text
        if start == 0:  # of a text that was changed, pieces of the old one are not to be taken for the new one's
            self._pieces[kind, tenant, key] = {}
        pieces = self._pieces.setdefault((kind, tenant, key), {})
        pieces[start] = piece
        if len(pieces) >= -(-length // NAME_PIECE_BYTES):
            del self._pieces[kind, tenant, key]
            self._keep(kind, tenant, key, b"".join(pieces[each] for each in sorted(pieces)))

    def _keep(self, kind: RecordKind, tenant: int, key: bytes, text: bytes) -> None:
        if kind is RecordKind.NAME:
            self.names[tenant, key] = text
        elif not any(key):
            self.tenants[tenant] = text
        else:
            self.notes[key.rstrip(b"\0")] = text

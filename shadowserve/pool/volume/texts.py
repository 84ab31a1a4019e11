"""Texts of a volume's own in the log: names of tenants and notes of the pool. Those of keys are the index's."""

from typing import Any

import numpy as np
import numpy.typing as npt

from shadowserve.pool.volume.format import NAME_PIECE_BYTES, RECORD_BYTES, RecordKind, unpack_name


class TextReader:
    """Puts texts together from records that may be anything.

    Attributes:
        tenants: names by id.
        notes: of the pool, by name.
        refused: records that cannot be.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.tenants: dict[int, bytes] = {}
        self.notes: dict[bytes, bytes] = {}
        self.refused = 0
        self._pieces: dict[tuple[int, bytes], dict[int, bytes]] = {}

    def read(self, records: npt.NDArray[Any]) -> None:
        """Take TENANT records, in the order of the log."""
        content = np.ascontiguousarray(records).tobytes()
        for at in range(0, len(content), RECORD_BYTES):
            self._read(content[at : at + RECORD_BYTES])

    def _read(self, record: bytes) -> None:
        text = unpack_name(record)
        if text is None or text[0] is not RecordKind.TENANT:
            self.refused += 1
            return
        _, tenant, key, start, length, piece = text
        if start == 0:  # of a text that was changed, pieces of the old one are not to be taken for the new one's
            self._pieces[tenant, key] = {}
        pieces = self._pieces.setdefault((tenant, key), {})
        pieces[start] = piece
        if len(pieces) >= -(-length // NAME_PIECE_BYTES):
            del self._pieces[tenant, key]
            self._keep(tenant, key, b"".join(pieces[each] for each in sorted(pieces)))

    def _keep(self, tenant: int, key: bytes, text: bytes) -> None:
        if not any(key):
            self.tenants[tenant] = text
        else:
            self.notes[key.rstrip(b"\0")] = text

"""A second decoder of kvrans, written only from docs/design/kvrans.md: slow, plain, and without code of the C
core."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class BadStreamError(Exception):
    """The bytes are not a stream, or not one of that size."""


@dataclass
class Table:
    """One table: for each of 256 slots its symbol, for each symbol its slots."""

    index: list[int]
    frequency: list[int]
    start: list[int]


class Reader:
    """Bytes of a stream or of one of its sections, front to back."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        if self.position + size > len(self.data):
            raise BadStreamError(f"{size} bytes wanted at {self.position} of {len(self.data)}")
        self.position += size
        return self.data[self.position - size : self.position]

    def rest(self) -> bytes:
        """Return all remaining bytes."""
        return self.take(len(self.data) - self.position)


class BitReader:
    """Bits of a reader's bytes, the lowest bit of a byte first."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._bits = 0
        self._count = 0

    def take(self, count: int) -> int:
        """Return a number of ``count`` bits."""
        while self._count < count:
            self._bits |= self._reader.take(1)[0] << self._count
            self._count += 8
        value = self._bits & ((1 << count) - 1)
        self._bits >>= count
        self._count -= count
        return value

    def padding(self) -> None:
        """Check that the remaining bits of the last byte are zeros."""
        if self._bits:
            raise BadStreamError("bits after the last one are not zero")


def decode(stream: bytes, size: int) -> bytes:
    """Return the ``size`` decoded bytes of ``stream``."""
    reader = Reader(stream)
    version = reader.take(1)[0]
    columns = int.from_bytes(reader.take(3), "little")
    if version != 1 or not 1 <= columns <= 65536:
        raise BadStreamError(f"version {version}, rows of {columns} bytes")
    made = b""
    rows_left = size // columns
    while rows_left > 0:
        kind, rows = reader.take(1)[0], reader.take(1)[0] + 1
        if rows > rows_left or kind > 1:
            raise BadStreamError(f"block of kind {kind} with {rows} rows, {rows_left} left")
        made += _coded_block(reader, rows, columns) if kind == 1 else reader.take(rows * columns)
        rows_left -= rows
    made += reader.take(size % columns)
    if reader.rest():
        raise BadStreamError("bytes behind the end")
    return made


def _coded_block(stream: Reader, rows: int, columns: int) -> bytes:
    layout, alphabet = stream.take(2)
    reader = Reader(stream.take(int.from_bytes(stream.take(4), "little")))
    shift, lanes, table_count = layout & 3, 64 << (layout >> 2 & 3), (layout >> 4) + 1
    count, listed, limit = (alphabet & 63) + 1, alphabet & 128, 256 >> shift
    if lanes > 256 or alphabet & 64:
        raise BadStreamError(f"layout {layout:#x}, alphabet {alphabet:#x}")
    values = list(reader.take(count if listed else 1))
    if not listed:
        values = [values[0], *((values[0] + index) % limit for index in range(1, count))]
    if max(values) >= limit or (listed and sorted(set(values)) != values):
        raise BadStreamError(f"alphabet {values}")
    bits = BitReader(reader)
    column_tables = [bits.take((table_count - 1).bit_length()) for _ in range(columns)]
    bits.padding()
    if max(column_tables) >= table_count:
        raise BadStreamError("a column has a table that does not exist")
    bits = BitReader(reader)
    tables = [_table(bits, count) for _ in range(table_count)]
    bits.padding()
    cells = np.zeros((rows, columns), np.uint8)
    plane_size = (rows + 7) // 8
    for column in range(columns):
        for bit in range(shift):
            plane = np.frombuffer(reader.take(plane_size), np.uint8)
            cells[:, column] |= np.unpackbits(plane, bitorder="little")[:rows] << bit
    lanes_used = min(rows, lanes)
    low, high = reader.take(lanes_used), reader.take(lanes_used)
    states = [high[lane] << 8 | low[lane] for lane in range(lanes_used)]
    if min(high) == 0:
        raise BadStreamError("a state is too small")
    _symbols(reader, cells, states, lanes, [tables[table] for table in column_tables], [v << shift for v in values])
    return cells.tobytes()


def _table(bits: BitReader, count: int) -> Table:
    order = bits.take(2)
    frequencies: list[int] = []
    for _ in range(count):
        length = order
        while bits.take(1) == 0:
            length += 1
            if length > 8:
                raise BadStreamError("a frequency is too large")
        frequencies.append((1 << length) + bits.take(length) - (1 << order))
    if sum(frequencies) != 256 or max(frequencies) > 255:
        raise BadStreamError(f"frequencies {frequencies}")
    index = [symbol for symbol, frequency in enumerate(frequencies) for _ in range(frequency)]
    return Table(index, frequencies, [sum(frequencies[:symbol]) for symbol in range(count)])


def _symbols(
    reader: Reader, cells: NDArray[np.uint8], states: list[int], lanes: int, tables: list[Table], values: list[int]
) -> None:
    rows, columns = cells.shape
    for column in range(columns):
        table = tables[column]
        for row in range(rows):
            state = states[row % lanes]
            slot = state & 255
            symbol = table.index[slot]
            state = table.frequency[symbol] * (state >> 8) + slot - table.start[symbol]
            if state < 256:
                state = state << 8 | reader.take(1)[0]
            states[row % lanes] = state
            cells[row, column] |= values[symbol]
    if set(states) != {256} or reader.rest():
        raise BadStreamError("the symbols do not end with the coded bytes")

"""Reading the commands of a server's clients, many at a time."""

from struct import unpack_from
from typing import Final, TypeAlias

from shadowserve.native._library import ffi, lib

__all__ = ["BATCH_ARGUMENTS_MAX", "BATCH_BULK_BYTES_MAX", "CommandRun", "read_commands"]

BATCH_ARGUMENTS_MAX: Final = lib.SS_COMMANDS_ARGUMENTS_MAX
"""Of all commands that are read at a time."""

BATCH_BULK_BYTES_MAX: Final = 0xFFFF
"""Of one argument of theirs."""


_read = lib.ss_commands_read
_string = ffi.string


CommandRun: TypeAlias = tuple[tuple[bytes, ...], int]
"""Commands that follow each other, all of the same name and with as many arguments: the arguments of all, one command's
behind another's, names included, and how many each has."""


class _Room:
    """What one call writes to, and how it is read."""

    __slots__ = ("commands", "layout", "runs")

    def __init__(self) -> None:
        self.commands = ffi.new("struct ss_commands *")
        self.runs = ffi.buffer(self.commands.runs)
        self.layout = self.commands.layout


_rooms: Final[list[_Room]] = []  # not in use; as many as threads have ever read at the same time


def read_commands(data: bytes, offset: int, arguments_max: int, bytes_max: int) -> tuple[list[CommandRun], int]:
    """Return the whole commands that begin at ``offset``, run by run, and where they end.

    At most some hundred; commands of more arguments, longer arguments, or written in any unusual way end the list.
    """
    try:
        room = _rooms.pop()
    except IndexError:
        room = _Room()
    commands = room.commands
    count = _read(data, offset, len(data), arguments_max, bytes_max, commands)
    if count == 0:
        _rooms.append(room)
        return [], offset
    # C cannot make Python's objects without its headers, but can say where they are: struct cuts them all in one call.
    found = unpack_from(_string(room.layout), data, offset)
    end = commands.end
    sizes = room.runs[: 2 * count]
    _rooms.append(room)
    if count == 1:  # most often
        return [(found, sizes[1])], end
    runs: list[CommandRun] = []
    first = 0
    for number in range(0, len(sizes), 2):
        width = sizes[number + 1]
        after = first + sizes[number] * width
        runs.append((found[first:after], width))
        first = after
    return runs, end

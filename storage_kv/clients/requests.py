"""What a client may send, and which of its bytes stay where they were received."""

from typing import Final

from shadowserve.resp import Limits
from storage_kv.node import Argument, Node, Session

__all__ = ["limits_of", "with_bytes"]

_UNAUTHENTICATED_ITEMS_MAX: Final = 10
_UNAUTHENTICATED_BULK_BYTES_MAX: Final = 16 << 10  # both as Redis


def limits_of(node: Node, session: Session) -> Limits:
    """Return what a client may send: little until it has authenticated."""
    config = node.config
    if not session.authenticated:
        return Limits(
            bulk_bytes_max=min(_UNAUTHENTICATED_BULK_BYTES_MAX, config.bulk_bytes_max),
            items_max=_UNAUTHENTICATED_ITEMS_MAX,
            unauthenticated=True,
        )
    return Limits(
        bulk_bytes_max=config.bulk_bytes_max,
        items_max=config.arguments_max,
        total_bytes_max=config.request_bytes_max,
    )


def with_bytes(command: list[Argument]) -> list[Argument]:
    """Return the command with only SET's value left where it was received: nothing else is worth its buffer."""
    is_set = bytes(command[0][:4]).upper() == b"SET"
    return [
        argument if isinstance(argument, bytes) or (is_set and position == 2) else bytes(argument)
        for position, argument in enumerate(command)
    ]

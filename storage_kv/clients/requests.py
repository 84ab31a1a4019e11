"""What a client may send."""

from typing import Final

from shadowserve.resp import Limits
from storage_kv.node import Node
from storage_kv.session import Session

_UNAUTHENTICATED_ITEMS_MAX: Final = 10
_UNAUTHENTICATED_BULK_BYTES_MAX: Final = 16 << 10  # both as Redis
_UNAUTHENTICATED_TOTAL_BYTES_MAX: Final = 2 * _UNAUTHENTICATED_BULK_BYTES_MAX


def limits_of(node: Node, session: Session) -> Limits:
    """Return what a client may send: little until it has authenticated."""
    config = node.config
    if not session.authenticated:
        return Limits(
            bulk_bytes_max=min(_UNAUTHENTICATED_BULK_BYTES_MAX, config.bulk_bytes_max),
            items_max=_UNAUTHENTICATED_ITEMS_MAX,
            line_bytes_max=_UNAUTHENTICATED_BULK_BYTES_MAX,
            total_bytes_max=_UNAUTHENTICATED_TOTAL_BYTES_MAX,
            unauthenticated=True,
        )
    return Limits(
        bulk_bytes_max=config.bulk_bytes_max,
        items_max=config.arguments_max,
        total_bytes_max=config.request_bytes_max,
    )

"""Our own commands; their names begin with ``KV.``."""

from shadowserve.resp import encode_array_header, encode_null
from storage_kv.node import Argument, Node, Reply, Session

__all__ = ["meta"]


def meta(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.META key [key ...]: of each record its length and its head; nil where there is none.

    One round trip tells a reader everything about a whole prefix that it needs before it fetches bodies. Counts as a
    use of each record found: whoever asks is about to fetch.
    """
    null = encode_null(session.protocol)
    parts = [encode_array_header(len(arguments) - 1)]
    node.counters.meta_keys += len(arguments) - 1
    for key in arguments[1:]:
        item = node.read(bytes(key))
        if item is None or not item.head_bytes:
            parts.append(null)
            continue
        head = bytes(item.value[: item.head_bytes])
        parts.append(b"*2\r\n:%d\r\n$%d\r\n%b\r\n" % (len(item.value), len(head), head))
    return b"".join(parts)

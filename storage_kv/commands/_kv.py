"""Our own commands; their names begin with ``KV.``."""

from shadowserve.resp import encode_array_header, encode_null
from storage_kv.commands._arguments import as_integer, bulk_of, settled
from storage_kv.engine import Item
from storage_kv.node import Argument, CommandError, Node, Part, Reply, Series, Session

__all__ = ["meta", "pin"]

_PIN_SECONDS_MAX = 10 * 365 * 86_400  # so that its end can be kept in 32 bits


def meta(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.META key [key ...]: of each record its length and its head; nil where there is none.

    One round trip tells a reader everything about a whole prefix that it needs before it fetches bodies. Counts as a
    use of each record found: whoever asks is about to fetch.
    """
    null = encode_null(session.protocol)
    node.counters.meta_keys += len(arguments) - 1

    def head(item: Item | None) -> bytes | list[Part]:
        if item is None or not item.head_bytes:
            return null
        return bulk_of(node, item, 0, item.head_bytes, missing=null, head=b"*2\r\n:%d\r\n" % item.length)

    items = (node.read(session.qualify(key)) for key in arguments[1:])
    return Series.of([encode_array_header(len(arguments) - 1)], items, head)


def pin(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.PIN seconds key [key ...]: how many of them are there, and will not be evicted for so long; 0 unpins."""
    seconds = as_integer(arguments[1])
    if not 0 <= seconds <= _PIN_SECONDS_MAX:
        raise CommandError("ERR invalid pin time in 'kv.pin' command")
    until_ms = node.clock_ms() + 1000 * seconds if seconds else 0
    found = sum(node.engine.pin(session.qualify(key), until_ms) for key in arguments[2:])
    return settled(node, node.engine.barrier() if found else None, "KV.PIN", b":%d\r\n" % found)

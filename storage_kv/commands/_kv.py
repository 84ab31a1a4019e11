"""ShadowServe's own commands; their names begin with ``KV.``."""

from collections.abc import Sequence
from math import inf
from typing import Final

from shadowserve import spans
from shadowserve.pool.types import Address, Item, PinShareError
from shadowserve.resp import Map, Value, encode, encode_array_header, encode_null
from storage_kv.command_spans import CommandSpans
from storage_kv.commands._arguments import (
    KEYS_AT_A_TIME,
    as_integer,
    bulk_of,
    count_in_steps,
    in_steps,
    syntax_error,
    when_durable,
)
from storage_kv.layers import KEYS_MAX, LAYERS_MAX
from storage_kv.node import Node
from storage_kv.pending_keys import NAME_BYTES_MAX, SECONDS_MAX, TooManyPendingError
from storage_kv.reply import CommandError, Continuation, Part, Reply
from storage_kv.session import Argument, Session

_LAYERS_TEXT_BYTES_MAX: Final = 16 << 10
_LAYER_MAX: Final = 65_535
_BITS_PER_S_MAX: Final = 1 << 50
_LOG_NAME_BYTES_MAX: Final = 64
_WINDOW_US_MAX: Final = 3_600 * 10**6


def meta(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.META key [key ...]: one round trip gives a reader all that it needs before it fetches bodies.

    For a record that only the bucket has, an integer replaces the header: in how many milliseconds the record can be
    here if it and those before it are requested now, at least 1. The bucket is not read.
    """
    null = encode_null(session.protocol)
    node.counters.meta_keys += len(arguments) - 1
    cold_bytes = 0

    def header(item: Item | None) -> bytes | list[Part]:
        nonlocal cold_bytes
        if item is None or not item.header_bytes:
            return null
        if item.is_cold:
            cold_bytes += item.length
            expected_ms = max(1, round(1e3 * (node.store.expected_s(cold_bytes) or 0)))
            return b"*2\r\n:%d\r\n:%d\r\n" % (item.length, expected_ms)
        return bulk_of(node, item, 0, item.header_bytes, missing=null, prefix=b"*2\r\n:%d\r\n" % item.length)

    items = (node.read(session.qualify(key), lookup=True) for key in arguments[1:])
    return Continuation.of([encode_array_header(len(arguments) - 1)], items, header)


def prefetch(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.PREFETCH key [key ...]: starts to read records in order, as many as the bucket delivers in about a second."""
    names, position, count = arguments[1:], 0, 0

    def step() -> Reply | None:
        nonlocal position, count
        for name in names[position : position + KEYS_AT_A_TIME]:
            address = session.qualify(name)
            item = node.store.peek(address)
            if item is not None and item.is_cold:
                if not node.prefetches.begin(address, item):
                    return b":%d\r\n" % count
                count += 1
        position += KEYS_AT_A_TIME
        return b":%d\r\n" % count if position >= len(names) else None

    return in_steps(step)


def load(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.LOAD: how many microseconds the bytes that wait for clients need on the node's link; 0 for an idle node."""
    node.load.is_asked = True
    return b":%d\r\n" % node.load_us


def layers(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.LAYERS layers rate window key [key ...]; README.md has its arguments and reply."""
    if node.streams is None:
        raise CommandError("ERR the server is starting or stopping: try again")
    wanted = _layer_numbers(arguments[1])
    rate, window_us = as_integer(arguments[2]), as_integer(arguments[3])
    if not 0 <= rate <= _BITS_PER_S_MAX or not 0 <= window_us <= _WINDOW_US_MAX:
        raise CommandError("ERR invalid rate (bits per second) or window (microseconds) in 'kv.layers' command")
    least = node.config.layers_bits_per_s_min
    if rate and rate < least:
        raise CommandError(
            f"ERR a rate of {rate} bits per second is too low in 'kv.layers' command: at least {least:.0f} "
            "(layers_bits_per_s_min), or 0 for no limit"
        )
    if len(arguments) - 4 > KEYS_MAX:
        raise CommandError(f"ERR KV.LAYERS takes at most {KEYS_MAX} keys, got {len(arguments) - 4}")
    names = [bytes(name) for name in arguments[4:]]
    parts: list[Part] = node.streams.open(session, names, wanted, rate or inf, window_us / 1e6)
    return parts


def _layer_numbers(argument: Argument) -> list[int]:
    """Parse a list of layers; each may occur once."""
    error = CommandError(
        f"ERR invalid layers in 'kv.layers' command: numbers and ranges such as 0-31 or 5,0-4, each layer once, "
        f"at most {LAYERS_MAX} of them"
    )
    found: list[int] = []
    text = bytes(argument[: _LAYERS_TEXT_BYTES_MAX + 1])
    if len(text) > _LAYERS_TEXT_BYTES_MAX:
        raise error
    for part in text.split(b","):
        first, is_range, last = part.partition(b"-")
        if not first.isdigit() or not (last.isdigit() if is_range else True) or len(part) > 11:
            raise error
        begin, end = int(first), int(last if is_range else first)
        if not begin <= end <= _LAYER_MAX or len(found) + end - begin >= LAYERS_MAX:
            raise error
        found += range(begin, end + 1)
    if len(set(found)) < len(found):
        raise error
    return found


def events(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.EVENTS log position: name of the tenant's log, next position, and the changes in between.

    Nil for the changes: the caller reads all keys with SCAN, and then the changes from that position on.
    """
    if not session.user.reads_every_key:
        raise CommandError("NOPERM this user may not read every key, and KV.EVENTS tells of all")
    position = as_integer(arguments[2])
    found = node.store.read_changes(session.tenant, bytes(arguments[1][:_LOG_NAME_BYTES_MAX]), position)
    if found is None:
        raise CommandError("ERR events are off: set events_bytes_max of the storage node and start it again")
    return encode(list(found), session.protocol)


def publish(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.PUBLISH milliseconds key [key ...]: returns how many keys are pending now or, with 0 ms, were so before.

    A key that exists does not become pending. Where there is no room for more keys the rest stays unchanged.
    """
    lasts_ms = as_integer(arguments[1])
    if not 0 <= lasts_ms <= 1000 * SECONDS_MAX:
        raise CommandError(f"ERR invalid time in 'kv.publish' command: 0 to {1000 * SECONDS_MAX} milliseconds")
    if any(len(name) > NAME_BYTES_MAX for name in arguments[2:]):
        raise CommandError(f"ERR a pending key has at most {NAME_BYTES_MAX} bytes")

    def publish_some(names: Sequence[Argument], before: int) -> int:
        keys = [session.qualify(name) for name in names]
        if not lasts_ms:
            return node.pending_keys.withdraw(session.id, keys)
        keys = [key for key in keys if node.store.peek(key) is None]
        now_ms = node.clock_ms()
        try:
            node.pending_keys.add(session.id, keys, now_ms, now_ms + lasts_ms)
        except TooManyPendingError as error:
            raise CommandError(f"OOM {error}. {before} of this command's keys are pending") from None
        return len(keys)

    return count_in_steps(arguments[2:], publish_some)


def pending(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.PENDING key [key ...]: for how many more milliseconds each is pending; 0 if it is not, or exists."""
    now_ms = node.clock_ms()

    def remaining_ms(key: Address) -> bytes:
        until_ms = node.pending_keys.until_ms(key, now_ms)
        if until_ms and node.store.peek(key) is not None:
            node.pending_keys.discard(key)
            until_ms = 0
        return b":%d\r\n" % max(0, until_ms - now_ms)

    return Continuation.of([encode_array_header(len(arguments) - 1)], map(session.qualify, arguments[1:]), remaining_ms)


def pin(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.PIN seconds key [key ...]: at the first key that exceeds a share the rest stays unchanged."""
    seconds, seconds_max = as_integer(arguments[1]), node.config.pin_max_s
    if not 0 <= seconds <= seconds_max:
        raise CommandError(f"ERR invalid pin time in 'kv.pin' command: 0 to {seconds_max} seconds (pin_max_s)")
    until_ms = node.clock_ms() + 1000 * seconds if seconds else 0

    def pin_some(names: Sequence[Argument], before: int) -> int:
        count = 0
        for name in names:
            try:
                count += node.store.pin(session.qualify(name), until_ms)
            except PinShareError as error:
                raise CommandError(f"OOM {error}. {before + count} of this command's keys are pinned") from None
        return count

    def finish(count: int) -> Reply:
        return when_durable(node, node.store.barrier() if count else None, "KV.PIN", b":%d\r\n" % count)

    return count_in_steps(arguments[2:], pin_some, finish)


def trace(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.TRACE traceparent [count]: a span of the caller that the next commands of the connection belong to.

    They are ``count``, or all until the next KV.TRACE. Returns 1 if the node records spans, else 0. An invalid context
    is ignored.
    """
    if len(arguments) > 3:
        syntax_error()
    count = as_integer(arguments[2]) if len(arguments) == 3 else -1
    session.spans = None
    if spans.recording() and len(arguments[1]) == spans.CONTEXT_LENGTH:
        session.spans = CommandSpans(bytes(arguments[1]).decode("ascii", "replace"), count)
    return b":%d\r\n" % spans.recording()


def unpin(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.UNPIN [TENANT name | ALL]: ends all pins of the own tenant, or of others; returns their number."""
    tenant: int | None = session.tenant
    if len(arguments) > 1:
        tenant = _other_tenant(node, session, arguments)
        node.audit.write("command", session, outcome="allowed", each=True, command="kv.unpin")
    count = 0

    def step() -> Reply | None:
        nonlocal count
        some = node.store.unpin_some(tenant)
        count += some
        if some:
            return None
        return when_durable(node, node.store.barrier() if count else None, "KV.UNPIN", b":%d\r\n" % count)

    return in_steps(step)


def pins(node: Node, session: Session, arguments: list[Argument]) -> Reply:
    """KV.PINS [TENANT name]: keys and bytes pinned by the own tenant, and its limit; operators see each tenant."""
    store = node.store
    tenants = [session.tenant]
    if len(arguments) > 1:
        other = _other_tenant(node, session, arguments)
        tenants = [other] if other is not None else store.pinning_tenants(KEYS_AT_A_TIME)
    elif session.user.is_operator:
        tenants = store.pinning_tenants(KEYS_AT_A_TIME)
    names = {number: name for name, number in store.tenants().items()}
    found: list[Value] = []
    for tenant in tenants:
        pinned = store.pinned(tenant)
        fields: list[Value] = [b"tenant", names[tenant].encode(), b"keys", pinned.keys]
        found.append(Map([*fields, b"bytes", pinned.bytes, b"bytes_max", pinned.bytes_max]))
    return encode(found, session.protocol)


def _other_tenant(node: Node, session: Session, arguments: list[Argument]) -> int | None:
    """Return the tenant of ``TENANT name``, or None for ``ALL``; operators only."""
    words = [bytes(argument) for argument in arguments[1:]]
    if not (len(words) == 1 and words[0].upper() == b"ALL") and not (len(words) == 2 and words[0].upper() == b"TENANT"):
        syntax_error()
    if not session.user.is_operator:
        raise CommandError("NOPERM only users with the category @admin may use pins of other tenants")
    if len(words) == 1:
        return None
    name = words[1].decode("utf-8", "replace")
    if name and name not in node.config.tenants and all(name != user.tenant for user in node.users.by_name.values()):
        raise CommandError("ERR there is no such tenant")
    return node.tenant_id(name)

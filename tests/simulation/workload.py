"""Clients and their commands. Each reply is checked against the model."""

import itertools
from collections.abc import Callable
from typing import Any, Final

from plan import Plan
from reference_model import FOREVER, Change, Model, Violation, Write, text_of
from simulated_client import Call, SimulatedClient
from simulated_network import Link
from world import MS, S, World

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.resp import ErrorReply

_SIZES: Final = (32, 200, 3000, 5000, 16 << 10, 40 << 10, 70 << 10, 200 << 10)
CHAINS: Final = 2
CHAIN_LENGTH: Final = 4
NAMESPACE: Final = b"n" * 32
_REFUSALS: Final = ("OOM", "IOERR")
_GRACE_NS: Final = S
_WEIGHTS: Final = (30, 30, 6, 5, 8, 6, 8, 2, 2)
_OF_MOVES: Final = (60, 20, 1, 1, 12, 4, 1, 1, 2)
"""Weights of the kinds of commands in _random_call(), for any run, and for runs that move keys between devices."""


def chunk_name(chain: int, number: int) -> bytes:
    return (chain << 32 | number + 1).to_bytes(32, "big")


def _without_addresses(reply: Any) -> str:
    """Return a text of a reply that is the same in each run: views of large values are shown by their lengths."""
    if isinstance(reply, list):
        return f"[{', '.join(_without_addresses(each) for each in reply)}]"
    return f"<{len(reply)} bytes>" if isinstance(reply, memoryview) else repr(reply)


class Workload:
    """Some clients, each with a number of turns.

    Attributes:
        silent: Half-open links; their clients may wait without a reply.
    """

    def __init__(
        self, world: World, model: Model, make_client: Callable[[int, str], SimulatedClient], plan: Plan
    ) -> None:
        self.world = world
        self.model = model
        self.silent: list[Link] = []
        self._make_client = make_client
        self._turns = 0
        self._under_way = 0
        self._numbers = itertools.count(1)
        self._clients = itertools.count()
        self._walls: list[tuple[int, int]] = [(0, world.wall_ms())]
        self._records: dict[tuple[bytes, int], bytes] = {}
        self._clocks = plan.clocks
        self._weights = _OF_MOVES if plan.moves else _WEIGHTS
        self._chunks = 0.1 if plan.moves else 0.4
        names = world.random.choice((2, 3) if plan.moves else (2, 6, 20))
        self._names = [f"key{number}".encode() for number in range(names)]
        self._largest = world.random.choice((4, 6, 6, len(_SIZES)))

    @property
    def finished(self) -> bool:
        return not self._turns and not self._under_way

    def describe(self) -> str:
        return f"{self._under_way} commands and {self._turns} turns"

    def begin(self, tenants: tuple[str, ...]) -> None:
        chance = self.world.random
        for _ in range(chance.randint(1, 4)):
            number = next(self._clients)
            tenant = chance.choice(tenants)
            client = self._make_client(number, tenant)
            turns = chance.randint(3, 14)
            self._turns += turns
            self._schedule(client, tenant, turns)

    def _schedule(self, client: SimulatedClient, tenant: str, turns: int) -> None:
        delay = self.world.random.expovariate(1 / (20 * MS))
        self.world.after(delay, client.name, lambda: self._turn(client, tenant, turns))

    def _turn(self, client: SimulatedClient, tenant: str, turns: int) -> None:
        if not client.idle:
            self._schedule(client, tenant, turns)
            return
        self._turns -= 1
        calls = [self._random_call(tenant) for _ in range(self.world.random.choice((1, 1, 2, 6)))]
        self._send(client, calls)
        if turns > 1:
            self._schedule(client, tenant, turns - 1)

    def _send(self, client: SimulatedClient, calls: list[Call]) -> None:
        self._under_way += len(calls)
        client.send(calls)

    # ---- Requests

    def _random_call(self, tenant: str) -> Call:
        chance = self.world.random
        kinds = (self._set, self._get, self._part, self._many, self._delete, self._expire, self._meta)
        return chance.choices((*kinds, self._pin, self._all), self._weights)[0](tenant)

    def _key(self) -> bytes:
        chance = self.world.random
        if chance.random() < self._chunks:
            return b"kv:" + chunk_name(chance.randrange(CHAINS), chance.randrange(CHAIN_LENGTH)).hex().encode()
        return chance.choice(self._names)

    def _set(self, tenant: str) -> Call:
        chance = self.world.random
        key = self._key()
        number = next(self._numbers)
        write = Write("set", 0, lambda: FOREVER, number=number)
        if key.startswith(b"kv:"):
            write.value, write.header_bytes = self._record(key, chance.randrange(3))
            write.is_record = True
        else:
            write.value = text_of((tenant, key), number, _SIZES[chance.randrange(self._largest)])
        arguments: list[Any] = ["SET", key, write.value]
        dice = chance.random()
        if dice < 0.15:
            lifetime = chance.choice((50, 500, 5_000, 100_000))
            arguments += ["PX", lifetime]
        elif dice < 0.2:
            arguments += ["KEEPTTL"]
            write.keeps_expiry = True
        gets = chance.random() < 0.1
        if gets:
            arguments += ["GET"]
        self.model.add((tenant, key), write)
        call = self._call(tuple(arguments), lambda call: self._was_set(tenant, key, write, call, gets))
        self._begin(write, call)
        if dice < 0.15:
            call.extra["lifetime"] = lifetime
            write.expires = (self.world.wall_ms() + lifetime - self._uncertainty, FOREVER)
        return call

    def _begin(self, change: Change, call: Call) -> None:
        """Set the times of a change from those of the call."""
        change.begin_ns = self.world.now_ns

        def end() -> int:
            if call.end_ns is None:
                return FOREVER
            if call.answered:
                return call.end_ns
            # The outcome is unknown: the server may execute it as long as it has the connection.
            gone = None if call.link is None else call.link.server_gone_ns
            return FOREVER if gone is None else max(gone, call.end_ns) + _GRACE_NS

        change.end = end

    def _record(self, key: bytes, variant: int) -> tuple[bytes, int]:
        """Return one of the possible records of a chunk, and the length of its header."""
        found = self._records.get((key, variant))
        name = bytes.fromhex(key[3:].decode())
        if found is None:
            layout = ChunkLayout(
                namespace=NAMESPACE,
                dtype=DType.UINT8,
                layers=2,
                kinds=2,
                vector_length=64,
                tokens=(16, 64, 700)[variant],
                quantizer=Quantizer.PASSTHROUGH,
            )
            chain, number = divmod(int.from_bytes(name, "big"), 1 << 32)
            parent = chunk_name(chain, number - 2) if number > 1 else b""
            body = bytes([variant]) * layout.raw_bytes
            found = self._records[key, variant] = record.encode(name, native.Codec.NONE, layout, body, parent=parent)
        return found, record.verify(found, name).header_length

    def _get(self, tenant: str) -> Call:
        key = self._key()
        return self._call(("GET", key), lambda call: self._was_read(tenant, key, call, call.reply))

    def _part(self, tenant: str) -> Call:
        key = self._key()
        first = self.world.random.choice((0, 0, 100, 4096, 65536))
        last = first + self.world.random.choice((10, 2000, 100_000))

        def check(call: Call) -> None:
            if call.reply != b"":
                self._compare(tenant, key, call, call.reply, lambda write: write.value[first : last + 1])

        return self._call(("GETRANGE", key, first, last), check)

    def _many(self, tenant: str) -> Call:
        keys = [self._key() for _ in range(self.world.random.randint(1, 4))]

        def check(call: Call) -> None:
            assert isinstance(call.reply, list)
            for key, value in zip(keys, call.reply, strict=True):
                self._was_read(tenant, key, call, value)

        return self._call(("MGET", *keys), check)

    def _meta(self, tenant: str) -> Call:
        chain = self.world.random.randrange(CHAINS)
        keys = [b"kv:" + chunk_name(chain, number).hex().encode() for number in range(CHAIN_LENGTH)]

        def check(call: Call) -> None:
            assert isinstance(call.reply, list)
            for key, found in zip(keys, call.reply, strict=True):
                if found is None:
                    self._was_read(tenant, key, call, None)
                    continue
                assert isinstance(found, list)
                length, head = found

                def header(write: Write, length: int = length) -> bytes:
                    return write.value[: write.header_bytes] if len(write.value) == length else b""

                self._compare(tenant, key, call, head, header)

        return self._call(("KV.META", *keys), check)

    def _delete(self, tenant: str) -> Call:
        chance = self.world.random
        if chance.random() < 0.1:
            return self._clear(tenant)
        keys = [self._key() for _ in range(chance.choice((1, 1, 3)))]
        changes = [Change("remove", 0, lambda: FOREVER) for _ in keys]

        def check(call: Call) -> None:
            for change in changes:
                self._settle(change, call)

        call = self._call(("DEL", *keys), check)
        for key, change in zip(keys, changes, strict=True):
            self.model.add((tenant, key), change)
            self._begin(change, call)
        return call

    def _clear(self, tenant: str) -> Call:
        change = Change("remove", 0, lambda: FOREVER)
        call = self._call(("FLUSHDB",), lambda call: self._settle(change, call))
        self.model.add((tenant, b""), change)
        self._begin(change, call)
        return call

    def _expire(self, tenant: str) -> Call:
        chance = self.world.random
        key = self._key()
        change = Change("expiry", 0, lambda: FOREVER)
        arguments: tuple[Any, ...] = ("PERSIST", key)
        lifetime = 0
        if chance.random() < 0.7:
            lifetime = chance.choice((100, 1_000, 100_000))
            arguments = ("PEXPIRE", key, lifetime)

        def check(call: Call) -> None:
            if call.answered and call.reply == 0:
                change.rejected = True
            self._settle(change, call)
            if lifetime:
                change.expires = self._lifetime(call, lifetime)

        call = self._call(arguments, check)
        self.model.add((tenant, key), change)
        self._begin(change, call)
        if lifetime:
            change.expires = (self.world.wall_ms() + lifetime - self._uncertainty, FOREVER)
        return call

    @property
    def _uncertainty(self) -> int:
        """Time by which the clock may go back, in ms."""
        return 100_000_000 if self._clocks else 0

    def _pin(self, tenant: str) -> Call:
        if self.world.chance(0.2):
            return self._call(("KV.UNPIN",), lambda call: None)
        return self._call(("KV.PIN", self.world.random.choice((0, 1, 60)), self._key()), lambda call: None)

    def _all(self, tenant: str) -> Call:
        def check(call: Call) -> None:
            assert isinstance(call.reply, list)
            cursor, found = call.reply
            assert isinstance(found, list)
            for key in found:
                assert isinstance(key, bytes)
                self._compare(tenant, key, call, b"", lambda write: b"")
            if cursor == b"0":
                for key in self.model.keys():
                    if key[0] == tenant and key[1] not in found:
                        self._was_read(tenant, key[1], call, None)

        return self._call(("SCAN", "0", "COUNT", "1000"), check)

    def read_all(self) -> None:
        """Read every key of every tenant with new clients."""
        for tenant in dict.fromkeys(tenant for tenant, _ in self.model.keys()):
            client = self._make_client(next(self._clients), tenant)
            calls = [
                self._call(("GET", key), lambda call, key=key, of=of: self._was_read(of, key, call, call.reply))  # type: ignore[misc]
                for of, key in self.model.keys()
                if of == tenant
            ]
            self._send(client, [*calls, self._all(tenant)])

    # ---- Replies

    def _call(self, arguments: tuple[Any, ...], check: Callable[[Call], None]) -> Call:
        return Call(arguments, lambda call: self._ended(call, check))

    def _ended(self, call: Call, check: Callable[[Call], None]) -> None:
        self._under_way -= 1
        name = call.arguments[0]
        outcome = "gone"
        if call.answered:
            reply = call.reply
            outcome = str(len(reply)) if type(reply) is bytes else _without_addresses(reply)[:60]
            if isinstance(reply, ErrorReply) and reply.code not in _REFUSALS:
                raise Violation(f"refused: {call.arguments[:2]} was answered {reply!r}")
        elif call.timed_out and call.link not in self.silent:
            raise Violation(f"hang: {call.arguments[:2]} was not answered in {call.end_ns} after {call.begin_ns}")
        options = [each for each in call.arguments[1:] if not isinstance(each, bytes) or len(each) < 100]
        self.world.note(f"{call.client} {call.begin_ns} {name} {options} -> {outcome}")
        if call.answered and isinstance(call.reply, ErrorReply) and name in ("GET", "MGET", "GETRANGE", "KV.META"):
            raise Violation(f"refused: {call.arguments[:2]} was answered {call.reply!r}")
        if call.answered or name in ("SET", "DEL", "FLUSHDB", "PEXPIRE", "PERSIST"):
            check(call)

    def _settle(self, change: Change, call: Call) -> None:
        if not call.answered:
            return
        if isinstance(call.reply, ErrorReply):
            change.failed = True
        else:
            change.acknowledged = True

    def _was_set(self, tenant: str, key: bytes, write: Write, call: Call, gets: bool) -> None:
        lifetime = call.extra.get("lifetime")
        if lifetime is not None:
            write.expires = self._lifetime(call, lifetime)
        if not call.answered:
            return
        if isinstance(call.reply, ErrorReply):
            write.rejected = call.reply.code == "OOM"
            write.failed = not write.rejected
            return
        write.acknowledged = True
        if gets:
            self._was_read(tenant, key, call, call.reply, but=write)

    def _lifetime(self, call: Call, lifetime: int) -> tuple[int, int]:
        first, last = self.wall_between(call.begin_ns, self.world.now_ns if call.answered else FOREVER)
        return first + lifetime, FOREVER if last == FOREVER else last + lifetime

    def note_wall(self) -> None:
        self._walls.append((self.world.now_ns, self.world.wall_offset_ns))

    def wall_between(self, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """Return the least and the greatest time that the wall clock has shown in an interval."""
        offsets = [self.world.wall_offset_ns]
        for at_ns, offset in reversed(self._walls[1:]):
            offsets.append(offset)
            if at_ns < begin_ns:
                break
        else:
            offsets.append(0)
        base = self.world.wall_ms() - (self.world.now_ns + self.world.wall_offset_ns) // MS
        first = base + (begin_ns + min(offsets)) // MS - 1
        return first, FOREVER if end_ns == FOREVER else base + (end_ns + max(offsets)) // MS + 1

    def _was_read(self, tenant: str, key: bytes, call: Call, value: Any, but: Write | None = None) -> None:
        if value is None:
            wall = self.wall_between(0, self.world.now_ns)  # it may have been removed at any time
            assert call.end_ns is not None
            self.model.check_miss((tenant, key), call.begin_ns, call.end_ns, wall, str(call.arguments[0]))
            return
        self._compare(tenant, key, call, value, lambda write: write.value if write is not but else None)

    def _compare(
        self, tenant: str, key: bytes, call: Call, value: Any, expected: Callable[[Write], bytes | None]
    ) -> None:
        assert call.end_ns is not None
        wall = self.wall_between(call.begin_ns, call.end_ns)
        what = str(call.arguments[0])
        self.model.check_value(
            (tenant, key), lambda write: expected(write) == value, call.begin_ns, call.end_ns, wall, what
        )

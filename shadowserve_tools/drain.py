"""``shadowserve drain``: moves a storage node's records to the nodes that will serve them, before it is removed."""

import contextlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shadowserve import members
from shadowserve.errors import ConfigurationError, StorageError, StorageRefusedError, StorageUnavailableError
from shadowserve.placement import Placement, partition_of
from shadowserve_tools.flags import Size
from shadowserve_tools.fleet_stats import given_members, members_of
from shadowserve_tools.stats import Sample, logins
from shadowserve_tools.storage_client import Login, StorageClient

EXIT_CODES = """
\b
Exit codes:
  0  every record of the user's tenant is on another node, or in the bucket
  1  some are not: run it again; it goes on where it ended
  2  the command line is invalid
"""
_RECORD: Final = re.compile(rb"kv:[0-9a-f]{64}")
_KEYS: Final = 512
_PART_BYTES: Final = 16 << 20
_MIB: Final = 1 << 20
_ERRORS_MAX: Final = 8
_PREFETCH_S: Final = 10.0
"""Longest time to wait for the prefetches of ``_KEYS`` records, which are in the bucket whatever becomes of them."""
_PAUSE_S: Final = 0.1


@dataclass
class Drained:
    """Numbers of records of the node.

    Attributes:
        other_values: Values that are no records, which stay.
        other_tenants: Tenants whose records are not copied, as far as the user may see them.
    """

    copied: int = 0
    copied_bytes: int = 0
    present: int = 0
    in_bucket: int = 0
    vanished: int = 0
    failed: int = 0
    other_values: int = 0
    other_tenants: int = 0
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    @property
    def safe(self) -> int:
        """Number of records that are on another node, in the bucket, or not needed any more."""
        return self.copied + self.present + self.in_bucket + self.vanished

    @property
    def settled(self) -> int:
        """Number of records whose fate is known."""
        return self.safe + self.failed


class _Drain:
    """The copying. Each record goes to the first choice of its segment among the members that stay."""

    def __init__(self, address: str, weights: Mapping[str, float], connect: Callable[[str], StorageClient],
                 bytes_per_s: int) -> None:  # fmt: skip
        self.done = Drained()
        self._address = address
        self._placement = Placement(weights)
        self._connect = connect
        self._clients: dict[str, StorageClient] = {}
        self._bytes_per_s = bytes_per_s
        self._began_s = self._free_s = time.monotonic()
        self._run_id = self._source.info(("server",)).get("run_id")

    @property
    def _source(self) -> StorageClient:
        return self._client(self._address)

    def _client(self, address: str) -> StorageClient:
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return self._clients[address]

    def _drop(self, address: str) -> None:
        """Close a connection; the next call connects again."""
        if (broken := self._clients.pop(address, None)) is not None:
            broken.close()

    def begin(self) -> int:
        """Return the number of values to look at, and see whether other tenants have some."""
        tenants = Sample(self._source.info(("tenants",)), 0.0).groups("tenant")
        holders, own = sum(bool(each.get("keys")) for each in tenants), int(self._source.call("DBSIZE"))
        self.done.other_tenants = max(0, holders - (own > 0))
        return own

    def run(self, advance: Callable[[int], None]) -> None:
        cursor = b"0"
        try:
            while True:
                cursor, names = self._scan(cursor)
                self._move(names)
                advance(len(names))
                if cursor == b"0":
                    break
        except StorageError as error:  # of the node itself; the result tells what is done
            self._fail(0, error)
        self.done.seconds = round(time.monotonic() - self._began_s, 3)

    def close(self) -> None:
        for address in list(self._clients):
            self._drop(address)

    def _scan(self, cursor: bytes) -> list[Any]:
        arguments = "SCAN", cursor, "COUNT", str(_KEYS)
        try:
            return list(self._source.call(*arguments))
        except StorageUnavailableError:
            self._drop(self._address)
            return list(self._source.call(*arguments))

    def _move(self, names: Sequence[bytes]) -> None:
        by_target: defaultdict[str, list[bytes]] = defaultdict(list)
        for name in names:
            if _RECORD.fullmatch(name):
                by_target[self._placement.ranking(partition_of(bytes.fromhex(name[3:].decode())))[0]].append(name)
            else:
                self.done.other_values += 1
        for address, some in by_target.items():
            before = self.done.settled
            try:
                self._move_to(address, some)
            except StorageError as error:
                self._fail(len(some) - (self.done.settled - before), error)
                self._drop(address)
                self._drop(self._address)

    def _fail(self, count: int, error: StorageError) -> None:
        self.done.failed += count
        if str(error) not in self.done.errors and len(self.done.errors) < _ERRORS_MAX:
            self.done.errors.append(str(error))

    def _target(self, address: str) -> StorageClient:
        """Return the client of a member that stays; ConfigurationError: it is the node itself by another name."""
        is_new = address not in self._clients
        target = self._client(address)
        if is_new and self._run_id and target.info(("server",)).get("run_id") == self._run_id:
            raise ConfigurationError(f"{address} is the node itself: give ADDRESS as the members have it")
        return target

    def _move_to(self, address: str, names: Sequence[bytes]) -> None:
        """Copy what a node lacks, and let it prefetch what only the bucket has."""
        target = self._target(address)
        cold: list[bytes] = []
        for name, entry in zip(names, self._lookup(target, address, names), strict=True):
            if entry is None:
                try:
                    self._copy(target, name)
                except StorageRefusedError as error:  # of this record
                    self._fail(1, error)
            elif isinstance(entry[1], int):
                cold.append(name)
                self.done.in_bucket += 1
            else:
                self.done.present += 1
        until_s = time.monotonic() + _PREFETCH_S
        while cold and target.call("KV.PREFETCH", *cold) and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)  # a call begins as much as the bucket delivers in a second

    def _lookup(self, target: StorageClient, address: str, names: Sequence[bytes]) -> list[Any]:
        found = target.call("KV.META", *names)
        if len(found) != len(names) or not all(each is None or len(each) == 2 for each in found):
            raise StorageError(f"{address} does not answer KV.META as a storage node does")
        return list(found)

    def _copy(self, target: StorageClient, name: bytes) -> None:
        expires_ms = self._source.call("PEXPIRETIME", name)
        length = self._source.call("STRLEN", name)
        parts = [
            self._source.call("GETRANGE", name, str(first), str(first + _PART_BYTES - 1))
            for first in range(0, length, _PART_BYTES)
        ]
        value = b"".join(parts)
        if not length or len(value) != length:
            self.done.vanished += 1  # it was evicted or removed meanwhile
            return
        target.call("SET", name, value, *(["PXAT", str(expires_ms)] if expires_ms > 0 else []))
        self.done.copied += 1
        self.done.copied_bytes += length
        now_s = time.monotonic()
        self._free_s = max(now_s, self._free_s) + length / self._bytes_per_s
        time.sleep(self._free_s - now_s)


@click.command(epilog=EXIT_CODES)
@click.argument("address")
@click.argument("remaining", metavar="MEMBERS")
@click.option(
    "--rate", type=Size(least=_MIB), default="100MiB", show_default=True, help="Most bytes that are copied in a second."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@logins
@click.pass_context
def drain(context: click.Context, /, address: str, remaining: str, rate: int, as_json: bool, **login: Any) -> None:
    """Copy the records of the storage node ADDRESS to the MEMBERS that stay, before it is removed.

    MEMBERS is 'storage_nodes' of the data planes: addresses with commas, file:PATH or dns:NAME:PORT; ADDRESS may be one
    of them. The node serves meanwhile. Then remove it from the members, run this again for what was stored since, and
    stop it. Only records of the user's tenant are copied: run it for each. Records that a member has are left out, and
    those in the bucket are prefetched. Copies are not pinned: pin them again.
    """
    given = given_members(remaining) or [remaining]
    weights = members_of(given)
    Login.at(address)  # refuses a malformed one
    weights.pop(address, None)
    if not weights:
        raise ConfigurationError(f"no member stays: {remaining} has {address} only")

    def connect(where: str) -> StorageClient:
        return StorageClient(Login.at(where, server_name=members.service_of(given), **login))

    console = Console(stderr=True)
    quiet = as_json or not console.is_terminal
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    work = _Drain(address, weights, connect, rate)
    with contextlib.closing(work), Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task(escape(address), total=work.begin())
        work.run(lambda count: bar.update(task, advance=count))
    done = work.done
    if as_json:
        click.echo(json.dumps({"where": address} | asdict(done)))
    else:
        click.echo(
            f"{address}: copied {done.copied:,} records, {done.copied_bytes:,} bytes, in {done.seconds:.0f} s; "
            f"{done.present:,} were present, {done.in_bucket:,} are in the bucket, {done.vanished:,} are gone, "
            f"{done.failed:,} failed; {done.other_values:,} other values stay"
        )
        for text in done.errors:
            click.echo(f"  {text}")
    if done.other_tenants:
        click.echo(f"{address} has records of {done.other_tenants} other tenants: run this for each", err=True)
    context.exit(1 if done.errors else 0)

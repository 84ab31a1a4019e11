"""The members of a fleet of storage nodes, and their weights: from a list, a file or DNS, read again while it runs.

A member is ``host:port`` or ``host:port=weight``. Members are given as a list of them, as ``file:PATH`` with one on
each line, or as ``dns:NAME:PORT``: all addresses of NAME, of a headless service. An address whose reverse name lies
below NAME (``storage-0.NAME``) is a member under that name, so that it keeps its segments when its address changes.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from shadowserve.addresses import join_address, split_address
from shadowserve.errors import ConfigurationError

MEMBERS_MAX: Final = 256
"""Most members: the C core's limit of nodes in one batch."""
_WEIGHT_MIN: Final = 0.01
_WEIGHT_MAX: Final = 100.0
_FILE_BYTES_MAX: Final = 1 << 20
_LOOKUPS_AT_ONCE: Final = 16
_NAMELESS: Final = frozenset({socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_FAMILY})
"""Errors by which an address has no reverse name; after others it may have one at the next attempt."""

Given: TypeAlias = list[str] | str
"""Members as they are configured."""

_log = logging.getLogger(__name__)


def parse(entries: Iterable[str]) -> dict[str, float]:
    """Return the weight of each member by its address, in order; ValueError says which entry is wrong."""
    weights: dict[str, float] = {}
    for entry in entries:
        address, equals, text = entry.strip().partition("=")
        if split_address(address)[1] == 0:
            raise ValueError(f"'{address}': a storage node cannot have port 0")
        if address in weights:
            raise ValueError(f"'{address}' is given twice")
        weights[address] = _weight(entry, text) if equals else 1.0
    if len(weights) > MEMBERS_MAX:
        raise ValueError(f"there are {len(weights)} members, and at most {MEMBERS_MAX} are possible")
    return weights


def _weight(entry: str, text: str) -> float:
    with contextlib.suppress(ValueError):
        weight = float(text)
        if _WEIGHT_MIN <= weight <= _WEIGHT_MAX:
            return weight
    raise ValueError(f"'{entry}': the weight must be a number, {_WEIGHT_MIN:g} to {_WEIGHT_MAX:g}")


def check(given: Given) -> Given:
    """Return configured members unchanged; ValueError says what is wrong. No file and no name is read."""
    if isinstance(given, str) and not _path_of(given):
        _split_service(given)
    elif not isinstance(given, str):
        parse(given)
    return given


def service_of(given: Given) -> str:
    """Return NAME of ``dns:NAME:PORT``, which the members' certificates hold; empty for other members."""
    return "" if not isinstance(given, str) or _path_of(given) else _split_service(given)[0]


def first(given: Given) -> dict[str, float]:
    """Return the members to begin with, without waiting for DNS: NAME:PORT stands for all of its addresses.

    ConfigurationError: the file cannot be used.
    """
    if isinstance(given, str) and service_of(given):
        return {given.removeprefix("dns:"): 1.0}
    try:
        return read(given)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{given}: {error}") from error


def read(given: Given) -> dict[str, float]:
    """Return the members now: read the file, or wait for DNS.

    Raises:
        OSError: The file cannot be read, or the name has no addresses.
        ValueError: There are no members, or something else.
    """
    if not isinstance(given, str):
        weights = parse(given)
    elif path := _path_of(given):
        weights = parse(_lines(path))
    else:
        weights = _resolve(*_split_service(given))
    if not weights:
        raise ValueError("it has no members")
    return weights


def _path_of(given: str) -> str:
    return given.removeprefix("file:") if given.startswith("file:") else ""


def _split_service(given: str) -> tuple[str, int]:
    if not given.startswith("dns:"):
        raise ValueError(f"'{given}': give a list of host:port, or file:PATH, or dns:NAME:PORT")
    name, port = split_address(given.removeprefix("dns:"))
    if port == 0:
        raise ValueError(f"'{given}': a storage node cannot have port 0")
    return name, port


def _lines(path: str) -> list[str]:
    with Path(path).open("rb") as file:
        data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise ValueError(f"it has more than {_FILE_BYTES_MAX} bytes")
    lines = (line.partition("#")[0].strip() for line in data.decode().splitlines())
    return [line for line in lines if line]


def _resolve(name: str, port: int) -> dict[str, float]:
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    addresses = sorted({str(address[0]) for _, _, _, _, address in found})
    if len(addresses) > MEMBERS_MAX:
        raise ValueError(f"it has {len(addresses)} addresses, and at most {MEMBERS_MAX} are possible")
    with ThreadPoolExecutor(_LOOKUPS_AT_ONCE, "reverse-names") as pool:
        names = list(pool.map(partial(_name_below, name), addresses))
    return dict.fromkeys((join_address(each, port) for each in names), 1.0)


def _name_below(service: str, address: str) -> str:
    """Return the reverse name of an address if it lies below a service's name, otherwise the address.

    OSError: the resolver failed. With the address in place of its name, a member would get other segments for a while.
    """
    try:
        name = socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0].rstrip(".").lower()
    except UnicodeError:
        return address
    except OSError as error:
        if error.errno in _NAMELESS:
            return address
        raise OSError(f"the reverse name of {address}: {error.strerror or error}") from error
    return name if f"{name.partition('.')[2]}.".startswith(f"{service.rstrip('.').lower()}.") else address


class Follower:
    """Reads the members every ``interval_s``, and gives changed ones to ``apply``.

    What cannot be read, or has no members, changes nothing. It is counted by ``refused``, and logged once. A member
    that a DNS answer lacks stays until the next answer: a pod that restarts has no address for a moment.

    ``timeout_s`` limits the first read only: the program starts without an answer, and a later read may take longer.
    """

    def __init__(
        self,
        given: Given,
        interval_s: float,
        apply: Callable[[Mapping[str, float]], Awaitable[None]],
        refused: Callable[[], None],
        timeout_s: float = 2.0,
    ) -> None:
        self._given = given
        self._interval_s = interval_s
        self._apply = apply
        self._refused = refused
        self._timeout_s = timeout_s
        self._reading: asyncio.Future[dict[str, float]] | None = None
        self._error = ""
        self._before: dict[str, float] = {}  # the last answer of DNS
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the members a first time, and go on; a list never changes."""
        await self._step(self._timeout_s)
        if isinstance(self._given, str):
            self._task = asyncio.create_task(self._run(), name="members")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._step()
            except Exception:  # a bug must not end it
                _log.exception("members_failed")

    async def _step(self, timeout_s: float | None = None) -> None:
        try:
            weights = await self._read(timeout_s)
        except (OSError, ValueError) as error:
            self._refused()
            if self._error != str(error):
                self._error = str(error)
                _log.warning("members_refused source=%s error=%r hint='the old ones stay'", self._given, str(error))
            return
        self._error = ""
        if service_of(self._given):
            both, self._before = self._before | weights, weights
            weights = both if len(both) <= MEMBERS_MAX else weights
        await self._apply(weights)

    async def _read(self, timeout_s: float | None) -> dict[str, float]:
        """Read in a thread of its own: a resolver may take longer than the time limit, and cannot be interrupted."""
        if self._reading is None:
            self._reading = future = asyncio.get_running_loop().create_future()
            threading.Thread(target=_read_into, args=(self._given, future), name="members", daemon=True).start()
        try:
            weights = await asyncio.wait_for(asyncio.shield(self._reading), timeout_s)
        except TimeoutError as error:
            raise OSError(f"no answer for {timeout_s:g} s") from error
        finally:
            if self._reading.done():
                self._reading = None
        return weights


def _read_into(given: Given, future: "asyncio.Future[dict[str, float]]") -> None:
    weights, failure = {}, None
    try:
        weights = read(given)
    except Exception as error:  # of any kind: it is the reader's
        failure = error

    def resolve() -> None:
        if future.cancelled():
            return
        if failure is None:
            future.set_result(weights)
        else:
            future.set_exception(failure)

    with contextlib.suppress(RuntimeError):  # the loop has ended
        future.get_loop().call_soon_threadsafe(resolve)

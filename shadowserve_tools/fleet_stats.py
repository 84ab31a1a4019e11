"""``shadowserve stats`` for a fleet: one row for each storage node."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.markup import escape

from shadowserve import members
from shadowserve.errors import ConfigurationError
from shadowserve.placement import PARTITIONS, Placement
from shadowserve.sizes import human_size
from shadowserve_tools.plane_stats import percent, since, table_of
from shadowserve_tools.summaries import Source

_AT_ONCE: Final = 32
_ERROR_CHARACTERS_MAX: Final = 60
_FIGURES: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {
    "load_s": ("load", lambda seconds: f"{1e3 * (seconds or 0):,.1f} ms"),
    "read_hit_rate": ("read hits", percent),
    "lookup_hit_rate": ("lookup hits", percent),
    "sent_bytes_per_s": ("sent", lambda rate: f"{human_size(rate)}/s"),
    "memory_used_bytes": ("stored", human_size),
    "records": ("records", "{:,}".format),
    "bucket_requests": ("bucket requests", lambda count: "-" if count is None else f"{count:,}"),
}
"""Figures of a node that answers: the heading and the text of each."""


def given_members(where: str) -> members.Given | None:
    """Return the members that an argument names: file:PATH, dns:NAME:PORT, addresses with commas; None for others."""
    if where.startswith(("file:", "dns:")):
        return where
    return where.split(",") if "," in where else None


def members_of(given: members.Given) -> dict[str, float]:
    """Return the weights of the members now; ConfigurationError says why there are none."""
    try:
        return members.read(given)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{given}: {error}") from error


def with_members(addresses: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the addresses, those of all nodes in place of a fleet, and the name in their certificates if it differs."""
    for where in addresses:
        given = given_members(where)
        name = "" if given is None else members.service_of(given)
        yield from ((each, name) for each in ([where] if given is None else members_of(given)))


class FleetView:
    """Successive views of all nodes; ``connect`` returns the source of one, by its address."""

    def __init__(self, given: members.Given, connect: Callable[[str], Source]) -> None:
        self._given = given
        self._connect = connect
        self._nodes: dict[str, Source] = {}
        self._placement = Placement({})
        self._shares: Mapping[str, float] = {}
        self._pool = ThreadPoolExecutor(_AT_ONCE, "fleet")
        self._follow()

    def _follow(self) -> None:
        weights = members_of(self._given)
        if weights == self._placement.weights:
            return
        self._placement = Placement(weights)
        firsts = self._placement.firsts()
        self._shares = {address: firsts.count(address) / PARTITIONS for address in weights}
        for address in self._nodes.keys() - weights.keys():
            self._nodes.pop(address).close()

    def step(self) -> dict[str, Any]:
        with suppress(ConfigurationError):  # data planes keep the old members, too
            self._follow()
        rows = list(self._pool.map(self._row, self._placement.weights))
        return {"kind": "fleet", "nodes": rows, "summary": None}

    def _row(self, address: str) -> dict[str, Any]:
        row = {"address": address, "weight": self._placement.weights[address], "share": self._shares[address]}
        try:
            if address not in self._nodes:
                self._nodes[address] = self._connect(address)
            view = self._nodes[address].step()
        except Exception as error:  # of a node that answers nonsense, too: the others are shown
            if (broken := self._nodes.pop(address, None)) is not None:
                broken.close()
            return row | {"state": str(error) or repr(error)}
        bucket = view.get("bucket")
        requests = None if bucket is None else bucket["lists"] + bucket["requests"] + bucket["written_objects"]
        state = "bucket unreachable" if bucket is not None and not bucket["up"] else "ok"
        figures = {name: view.get(name) for name in (*_FIGURES, "since")}
        return row | figures | {"bucket_requests": requests, "state": state}

    def render(self, view: Mapping[str, Any], where: str) -> RenderableType:
        """Return a view for the terminal."""
        nodes = view["nodes"]
        known = [each for each in nodes if "load_s" in each]
        head = f"{escape(where)}, fleet of {len(nodes)} storage nodes, {len(nodes) - len(known)} do not answer"
        period = since(known[0]) if known else ""
        table = table_of("node", "weight", "share", *(heading for heading, _ in _FIGURES.values()), "state")
        for each in nodes:
            cells = [text(each[name]) if name in each else "-" for name, (_, text) in _FIGURES.items()]
            sound = each["state"] == "ok"
            state = "ok" if sound else f"[red]{escape(each['state'][:_ERROR_CHARACTERS_MAX])}[/red]"
            table.add_row(escape(each["address"]), f"{each['weight']:g}", percent(each["share"]), *cells, state)
        return Group(head, table, f"hits and sent {period}; bucket requests since the start" if known else "")

    def close(self) -> None:
        self._pool.shutdown()
        for node in self._nodes.values():
            node.close()

"""``shadowserve stats`` for a data plane: fetches, stores, and connected engines."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table

from host_control.client import DataPlaneClient
from shadowserve.proto import dataplane_pb2 as pb
from shadowserve.sizes import human_size
from shadowserve.summary import Samples, Summarizer
from shadowserve.tls import Credentials
from shadowserve_tools.summaries import rendered, summarized

_COUNTERS: Final = ("batches", "fetched_bytes", "delivered_bytes", "stored_raw_bytes", "stored_bytes", "lookup_keys")
_TIMEOUT_S: Final = 5.0


@dataclass
class PlaneWatcher:
    """Successive statistics of a data plane; ``before``: the previous ones and their time."""

    client: DataPlaneClient
    before: tuple[pb.StatisticsResponse, float] | None = None
    summarizer: Summarizer = field(default_factory=Summarizer)

    @classmethod
    def connected(cls, address: str, credentials: Credentials | None) -> "PlaneWatcher":
        """Return a watcher of ``host:port`` or ``unix:/path``; ConfigurationError: the certificates are unusable."""
        return cls(DataPlaneClient(address, credentials=credentials, connect_timeout_s=_TIMEOUT_S))

    def step(self) -> dict[str, Any]:
        """Return the current view. Rates are since the previous step, or since the data plane's start."""
        now, taken_s = self.client.statistics(), time.monotonic()
        summary = summarized(self.summarizer, lambda: Samples.of_text(now.metrics.decode("utf-8", "replace")))
        now.ClearField("metrics")
        earlier, span_s = pb.StatisticsResponse(), max(now.up_seconds, 1.0)
        period = "start"
        if self.before is not None and self.before[0].up_seconds <= now.up_seconds:  # otherwise it was restarted
            earlier, span_s = self.before[0], max(taken_s - self.before[1], 1e-3)
            period = f"{span_s:.3g} s"
        self.before = (now, taken_s)
        found = now.lookup_keys - earlier.lookup_keys
        view: dict[str, Any] = MessageToDict(
            now, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        rates = {f"{name}_per_s": (getattr(now, name) - getattr(earlier, name)) / span_s for name in _COUNTERS}
        numbers: dict[str, Any] = _with_numbers(view)
        return numbers | {
            "kind": "data plane",
            "summary": summary,
            "lookup_hit_rate": (now.lookup_hits - earlier.lookup_hits) / found if found else None,
            **rates,
            "engines": [
                {
                    "process": each.process,
                    "model": each.model.hex(),
                    "chunk_tokens": each.chunk_tokens,
                    "quantizer": each.quantizer,
                }
                for each in now.engines
            ],
            "since": period,
        }

    def render(self, view: Mapping[str, Any], where: str) -> RenderableType:
        """Return a view for the terminal."""
        program = f"data plane, shadowserve {view['version']}, {view['backend']}"
        head = f"{escape(where)}, {program}, up {view['up_seconds']:.0f} s"
        state = "connected" if view["storage_connected"] else "[red]not connected[/red]"
        table = table_of("what", since(view))
        for title, text in (
            ("storage", f"{view['storage']}, {state}"),
            ("lookup hit rate", percent(view["lookup_hit_rate"])),
            ("fetched, as stored", f"{human_size(view['fetched_bytes_per_s'])}/s"),
            ("delivered to engines", f"{human_size(view['delivered_bytes_per_s'])}/s"),
            ("stored, as records", f"{human_size(view['stored_bytes_per_s'])}/s"),
            ("batches", f"{view['batches_per_s']:,.1f} /s"),
            ("buffers", human_size(view["buffer_bytes"])),
            ("resident memory", human_size(view["resident_bytes"])),
            ("registered memory", f"{view['registrations']:,} regions"),
        ):
            table.add_row(title, text)
        return Group(head, *rendered(view["summary"]), table, _outcomes(view), *_engines(view))

    def close(self) -> None:
        self.client.close()


def _with_numbers(value: Any) -> Any:
    """Convert the 64-bit integers that protobuf's JSON has as text."""
    if isinstance(value, dict):
        return {key: _with_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each) for each in value]
    return int(value) if isinstance(value, str) and value.isdigit() else value


def percent(rate: float | None) -> str:
    """Return a share in percent; a dash without one."""
    return "-" if rate is None else f"{100 * rate:.1f} %"


def since(view: Mapping[str, Any]) -> str:
    """Return the period of rates, as a column's heading."""
    return "since the start" if view["since"] == "start" else f"in the last {view['since']}"


def table_of(first: str, *numbers: str) -> Table:
    """Return a table whose rows have a name and numbers; narrow columns lose no digit."""
    columns = (Column(each, justify="right", overflow="fold") for each in numbers)
    return Table(Column(first, overflow="fold"), *columns, box=SIMPLE_HEAD, padding=0)


def _outcomes(view: Mapping[str, Any]) -> Table:
    table = Table("calls since the start", "outcomes", box=SIMPLE_HEAD, padding=0)
    for title, counts in (("Fetch", view["fetch_outcomes"]), ("Store", view["store_outcomes"])):
        listed = sorted(counts.items(), key=lambda each: -each[1])
        table.add_row(title, ", ".join(f"{name} {count:,}" for name, count in listed) or "-")
    return table


def _engines(view: Mapping[str, Any]) -> list[RenderableType]:
    if not view["engines"]:
        return []
    columns = ("engine", "model", Column("tokens of a chunk", justify="right"), "quantizer")
    table = Table(*columns, box=SIMPLE_HEAD, padding=0)
    forms: dict[str, set[tuple[int, str]]] = {}
    for each in view["engines"]:
        forms.setdefault(each["model"], set()).add((each["chunk_tokens"], each["quantizer"]))
        table.add_row(each["process"], each["model"][:8], str(each["chunk_tokens"]), each["quantizer"])
    different = [model[:8] for model, found in forms.items() if len(found) > 1]
    notes = [
        f"[yellow]engines of model {model} do not share KV: give them the same chunk_tokens and quantizer[/yellow]"
        for model in different
    ]
    return [table, *notes]

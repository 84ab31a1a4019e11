"""``shadowserve stats``: statistics of running programs, in the terminal or as JSON."""

import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from shadowserve import members
from shadowserve.addresses import join_address
from shadowserve.errors import StorageRefusedError, StorageUnavailableError
from shadowserve.sizes import human_size
from shadowserve.summary import STORAGE, Samples, Summarizer
from shadowserve.tls import Credentials
from shadowserve_tools.fleet_stats import FleetView, given_members
from shadowserve_tools.listener import identify
from shadowserve_tools.plane_stats import PlaneWatcher, percent, since, table_of
from shadowserve_tools.storage_client import Login, StorageClient
from shadowserve_tools.summaries import MetricsWatcher, Source, is_url, rendered, summarized
from storage_kv.metric_table import BUCKET, NODE, STORE, info_name

_SECTIONS: Final = ("server", "clients", "memory", "stats", "shadowserve", "commandstats", "devices", "tenants")
_BARS: Final = "▁▂▃▄▅▆▇█"
_HISTORY: Final = 60
_COMMANDS_SHOWN: Final = 6
_TENANTS_SHOWN: Final = 20
_RATES: Final = {
    f"{name}_per_s": info_name(name)
    for name in (
        *("commands", "hits", "misses", "lookup_hits", "lookup_misses"),
        *("received_bytes", "sent_bytes", "evicted_keys", "evicted_bytes"),
    )
}
"""Rates by their counters in INFO."""
_COUNTS: Final = (
    *("records", "pinned_keys", "pinned_bytes", "evicted_keys", "expired_keys", "scrub_rotten", "writing_bytes"),
    "tenants_known",
)
"""Numbers of INFO that a view has under their own names."""
_DRAWN: Final = (
    *("read_hit_rate", "lookup_hit_rate", "sent_bytes_per_s", "received_bytes_per_s", "commands_per_s"),
    "memory_used_bytes",
)
"""Values whose history is drawn."""
_OWN_ROWS: Final = ("lookup hit rate", "removed since the start", "records", "pinned")
"""Rows that Redis and Valkey do not have."""


def _pairs(text: str) -> dict[str, Any]:
    """Parse ``a=1,b=x``."""
    found: dict[str, Any] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name:
            found[name] = _number(value)
    return found


def _number(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True, slots=True)
class Sample:
    """A server's INFO at one moment of its clock; ``bucket``: INFO s3, empty without a bucket."""

    fields: Mapping[str, str]
    taken_s: float
    bucket: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, client: StorageClient) -> "Sample":
        """Return a new sample; StorageRefusedError: the user has no right to see the server's totals."""
        fields = client.info(_SECTIONS)
        if "total_commands_processed" not in fields:
            raise StorageRefusedError(
                "this user has no right to see the server's totals: log in as a user with the category @admin "
                "(--user, or that user's certificate)"
            )
        moment = fields.get("server_time_usec", "")
        return cls(fields, int(moment) / 1e6 if moment.isdigit() else time.time(), client.info(("s3",)))

    @property
    def other_server(self) -> str:
        """Name and version of a Redis or Valkey server; empty for a storage node."""
        if "shadowserve_version" in self.fields:
            return ""
        if version := self.fields.get("valkey_version"):
            return f"Valkey {version}"
        return f"Redis {self.fields['redis_version']}" if "redis_version" in self.fields else "an unknown server"

    def number(self, name: str) -> float:
        """Return a field as a number, 0 if it is missing."""
        value = _number(self.fields.get(name, "0"))
        return value if isinstance(value, int | float) else 0

    def groups(self, prefix: str) -> list[dict[str, Any]]:
        """Return the fields ``prefix0``, ``prefix1``... as mappings."""
        return [_pairs(text) for name, text in self.fields.items() if name.rstrip("0123456789") == prefix]

    def commands(self, earlier: "Sample", span_s: float) -> list[dict[str, Any]]:
        """Return the cost of each command since the server's start, the slowest first, and its current rate."""
        found = [
            {"command": name.removeprefix("cmdstat_")} | _pairs(text)
            for name, text in self.fields.items()
            if name.startswith("cmdstat_")
        ]
        for each in found:
            before = _pairs(earlier.fields.get(f"cmdstat_{each['command']}", "")).get("calls", 0)
            each["calls_per_s"] = max(0, each.get("calls", 0) - before) / span_s
        return sorted(found, key=lambda each: -float(each.get("usec_per_call", 0)))

    def tenants(self, earlier: "Sample", span_s: float) -> list[dict[str, Any]]:
        """Return the usage of each tenant, with the used rates of those that have limits."""
        found, before = self.groups("tenant"), {each.get("name"): each for each in earlier.groups("tenant")}
        total = sum(each.get("used_bytes", 0) for each in found)
        for each in found:
            past = before.get(each.get("name"), {})
            each["share"] = each.get("used_bytes", 0) / total if total else 0.0
            for counter in ("commands", "bytes"):
                if counter in each:
                    each[f"used_{counter}_per_s"] = max(0, each[counter] - past.get(counter, 0)) / span_s
            each["name"] = unquote(str(each.get("name", "")))
        return sorted(found, key=lambda each: (-each.get("used_bytes", 0), each["name"]))

    @property
    def samples(self) -> Samples:
        """The same metrics as the program's metrics endpoint has, as far as INFO shows them."""
        rows = [(row.name + "_total" * (row.kind == "counter"), row.info_name) for row in (*NODE, *STORE)]
        rows += [("up_seconds", "uptime_in_seconds"), ("clients", "connected_clients")]
        found: list[tuple[str, Mapping[str, str], float]]
        found = [(STORAGE + name, {}, self.number(shown)) for name, shown in rows if shown in self.fields]
        found += [(STORAGE + row.name, {}, float(self.bucket.get(str(row.source), 0) or 0))
                  for row in BUCKET if row.source == "up" and row.source in self.bucket]  # fmt: skip
        for name, label, counts in (
            ("evictions_total", "cause", _pairs(self.fields.get("evictions", ""))),
            ("lost_objects_total", "reason", _pairs(self.fields.get("lost_objects", ""))),
            ("device_healthy", "device", {each["name"]: each.get("healthy", 1) for each in self.groups("device")}),
        ):
            found += [(STORAGE + name, {label: str(value)}, float(count)) for value, count in counts.items()]
        return Samples(found)

    def _bucket(self) -> dict[str, Any] | None:
        if "failed_reads" not in self.bucket:
            return None
        counts = {"failed_reads", "failed_writes"}
        return {name: _pairs(text) if name in counts else _number(text) for name, text in self.bucket.items()}

    def view(self, before: "Sample | None" = None) -> dict[str, Any]:
        """Return the whole view. Rates are since ``before``, or since the server's start."""
        uptime_s = self.number("uptime_in_seconds")
        restarted = before is not None and before.fields.get("run_id") != self.fields.get("run_id")
        if before is None or restarted:
            span_s, earlier = max(uptime_s, 1.0), Sample({}, 0.0)
        else:
            span_s, earlier = max(self.taken_s - before.taken_s, 1e-3), before
        rates = {
            name: max(0.0, self.number(counter) - earlier.number(counter)) / span_s for name, counter in _RATES.items()
        }
        hits, lookup_hits = rates["hits_per_s"], rates["lookup_hits_per_s"]
        lookups = lookup_hits + rates["lookup_misses_per_s"]
        reads = hits + rates["misses_per_s"] - lookups
        return {
            "version": self.fields.get("shadowserve_version", ""),
            "other_server": self.other_server,
            "engine": self.fields.get("engine", ""),
            "uptime_s": uptime_s,
            "clients": int(self.number("connected_clients")),
            "load_s": self.number("load_seconds"),
            "read_hit_rate": max(0.0, hits - lookup_hits) / reads if reads > 0 else None,
            "lookup_hit_rate": lookup_hits / lookups if lookups else None,
            **rates,
            "memory_used_bytes": int(self.number("used_memory")),
            "memory_budget_bytes": int(self.number("maxmemory")),
            **{name: int(self.number(name)) for name in _COUNTS},
            **{name: _pairs(self.fields.get(name, "")) for name in ("evictions", "lost_objects")},
            "devices": self.groups("device"),
            "arenas": self.groups("arena"),
            "bucket": self._bucket(),
            "commands": self.commands(earlier, span_s),
            "tenants": self.tenants(earlier, span_s),
            "since": "start" if earlier.fields == {} else f"{span_s:.3g} s",
        }


@dataclass
class Watcher:
    """Successive samples, and the recent history of rates.

    Attributes:
        watches: True if there is a history to show.
    """

    watches: bool = False
    before: Sample | None = None
    history: dict[str, "deque[float]"] = field(default_factory=dict)

    def step(self, sample: Sample) -> dict[str, Any]:
        """Add a sample; return its view since the previous one."""
        view = sample.view(self.before)
        self.before = sample
        for name in _DRAWN:
            self.history.setdefault(name, deque(maxlen=_HISTORY)).append(view[name] or 0.0)
        return view

    def line(self, name: str) -> str:
        """Return the recent history of a value as a line of bars."""
        found = self.history.get(name, ())
        top = max(found, default=0.0)
        if len(found) < 2 or top <= 0:
            return ""
        return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in found)


def _rendered(view: Mapping[str, Any], where: str, watcher: Watcher) -> RenderableType:
    budget = view["memory_budget_bytes"]
    used = _of(human_size(view["memory_used_bytes"]), budget or None, human_size)
    server = f"shadowserve {view['version']}, {view['engine']}"
    if view["other_server"]:
        server = f"{view['other_server']}, not a storage node of ShadowServe: fewer counters"
    head = f"{escape(where)}, {server}, up {view['uptime_s']:.0f} s"
    watched = watcher.watches
    table = table_of("what", since(view))
    if watched:
        table.add_column(f"the last {_HISTORY} samples")
    for title, text, line in (
        ("read hit rate", percent(view["read_hit_rate"]), "read_hit_rate"),
        ("lookup hit rate", percent(view["lookup_hit_rate"]), "lookup_hit_rate"),
        ("sent", f"{human_size(view['sent_bytes_per_s'])}/s", "sent_bytes_per_s"),
        ("received", f"{human_size(view['received_bytes_per_s'])}/s", "received_bytes_per_s"),
        ("commands", f"{view['commands_per_s']:,.0f} /s", "commands_per_s"),
        ("stored" if view["devices"] else "memory", used, "memory_used_bytes"),
        ("evicted", f"{view['evicted_keys_per_s']:,.1f} /s, {human_size(view['evicted_bytes_per_s'])}/s", ""),
        ("removed since the start", _gone(view), ""),
        ("clients", f"{view['clients']:,}", ""),
        ("records", f"{view['records']:,}", ""),
        ("pinned", f"{view['pinned_keys']:,}, {human_size(view['pinned_bytes'])}", ""),
    ):
        if not view["other_server"] or title not in _OWN_ROWS:
            table.add_row(title, text, *([watcher.line(line)] if watched else []))
    return Group(
        head, *rendered(view["summary"]), table, *_devices(view), *_bucket(view), *_tenants(view), *_commands(view)
    )


def _gone(view: Mapping[str, Any]) -> str:
    """Return the causes of removed keys since the server's start, the most frequent one first."""
    causes = {**view["evictions"], **view["lost_objects"], "expired": view["expired_keys"]}
    return ", ".join(
        f"{cause} {count:,}" for cause, count in sorted(causes.items(), key=lambda each: -each[1]) if count
    )


def _devices(view: Mapping[str, Any]) -> list[RenderableType]:
    if not view["devices"] and not view["arenas"]:
        return []
    title = "devices: bytes, errors and times since the start"
    table = table_of("device", "state", "used", "read", "written", "queue", "errors", "read p99")
    for each in view["devices"]:
        table.add_row(
            str(each.get("name", "")),
            "in use" if each.get("healthy", 1) else "[red]out of use[/red]",
            f"{human_size(each.get('used_bytes', 0))} of {human_size(each.get('capacity_bytes', 0))}",
            human_size(each.get("read_bytes", 0)),
            human_size(each.get("written_bytes", 0)),
            str(each.get("queue_depth", 0)),
            str(each.get("errors", 0)),
            f"{each['read_p99_usec']} us" if "read_p99_usec" in each else "-",
        )
    for each in view["arenas"]:
        used = f"{human_size(each.get('used_bytes', 0))} of {human_size(each.get('capacity_bytes', 0))}"
        table.add_row(f"arena {each.get('name', '')}", "in use", used, *["-"] * 5)
    return [title, table]


def _bucket(view: Mapping[str, Any]) -> list[RenderableType]:
    bucket = view["bucket"]
    if bucket is None:
        return []
    state = "reachable" if bucket["up"] else f"unreachable for {bucket['failing_s']:.0f} s"
    if not bucket["up"] and not bucket["failing_s"]:
        state = "not listed yet"
    table = table_of(
        "bucket", "objects", "records", "bytes", "waiting reads", "waiting writes", "waiting removals", "failed"
    )
    failed = sum([*bucket["failed_reads"].values(), *bucket["failed_writes"].values()])
    counts = (f"{bucket[name]:,}" for name in ("reading", "waiting_records", "deleting"))
    held = f"{bucket['objects']:,}", f"{bucket['records']:,}", human_size(bucket["bytes"])
    table.add_row(state, *held, *counts, f"{failed:,}")
    return [table, *([Text(f"last error of the bucket: {bucket['last_error']}")] if bucket["last_error"] else [])]


def _tenants(view: Mapping[str, Any]) -> list[RenderableType]:
    if not any(each["name"] for each in view["tenants"]):
        return []  # only the default tenant
    title = f"tenants: rates {since(view)}; evictions and waits since the start"
    columns = ("clients", "keys", "bytes", "share", "pins", "evicted", "cmds/s", "bytes/s", "waits")
    table = table_of("tenant", *columns)
    shown = view["tenants"][:_TENANTS_SHOWN]
    for each in shown:
        table.add_row(
            each["name"] or "(default)",
            f"{each.get('clients', 0):,}",
            _of(f"{each.get('keys', 0):,}", each.get("keys_max"), "{:,}".format),
            _of(human_size(each.get("used_bytes", 0)), each.get("bytes_max"), human_size),
            f"{each['share']:.0%}",
            f"{each.get('pinned_keys', 0):,}",
            f"{each.get('evicted_keys', 0):,}",
            _rate(each, "commands", "{:,.0f}".format),
            _rate(each, "bytes", human_size),
            f"{each['throttled']:,}" if "throttled" in each else "-",
        )
    left = view["tenants_known"] - len(shown)
    if left > 0:
        title += f"; the largest, {left:,} more are not shown"
    return [title, table]


def _of(used: str, limit: float | None, text: Callable[[float], str]) -> str:
    return used if limit is None else f"{used} of {text(limit)}"


def _rate(tenant: Mapping[str, Any], what: str, text: Callable[[float], str]) -> str:
    """Return a rate and its limit; the rates of tenants without limits are not counted."""
    used = tenant.get(f"used_{what}_per_s")
    return "-" if used is None else _of(text(used), tenant.get(f"{what}_per_s"), text)


def _commands(view: Mapping[str, Any]) -> list[RenderableType]:
    if not view["commands"]:
        return []
    title = f"slowest commands: calls/s {since(view)}; all else since the start"
    table = table_of("command", "mean time", "calls", "calls/s", "failed", "refused")
    for each in view["commands"][:_COMMANDS_SHOWN]:
        counts = (f"{each.get(name, 0):,}" for name in ("failed_calls", "rejected_calls"))
        calls = (f"{each.get('calls', 0):,}", f"{each['calls_per_s']:,.1f}")
        table.add_row(str(each["command"]), f"{each.get('usec_per_call', 0):.1f} us", *calls, *counts)
    return [title, table]


def logins(command: Any) -> Any:
    """Add the options of credentials to a command."""
    for flag, help_text in (
        ("--tls-key", "File of the client certificate's private key."),
        ("--tls-cert", "File of the client's certificate, if the server requires one."),
        ("--tls-ca", "Use TLS, with this file of authorities, or 'system'."),
        ("--password", "Password; better in SHADOWSERVE_STORAGE_PASSWORD."),
        ("--user", "User name at a storage node. [default: the default user]"),
    ):
        variable = "SHADOWSERVE_STORAGE_PASSWORD" if flag == "--password" else None
        command = click.option(flag, default="", envvar=variable, help=help_text)(command)
    return command


@click.command()
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1)
@click.option(
    "--host", default="127.0.0.1", show_default=True,
    help="Name or address of a program, or a data plane's unix:/path; without ADDRESS.",
)  # fmt: skip
@click.option("--port", default=6380, show_default=True, type=click.IntRange(1, 65535), help="TCP port.")
@logins
@click.option("--watch", is_flag=True, help="Repeat until stopped (Ctrl-C).")
@click.option(
    "--interval", default=1.0, show_default=True, type=click.FloatRange(0.05), help="Interval of --watch, in seconds."
)
@click.option(
    "--count",
    default=0,
    type=click.IntRange(0),
    help="With --watch, stop after this number of samples; 0: never.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each sample of each program.")
def stats(addresses: tuple[str, ...], watch: bool, interval: float, count: int, as_json: bool, **login: Any) -> None:
    """Show what running programs do: does ShadowServe help, and what limits it?

    An ADDRESS is host:port, unix:/path or http(s)://host:port of a storage node, a data plane, a vLLM engine, or the
    metrics_port of any. The program is recognized by its protocol. 'storage_nodes' of a data plane (addresses with
    commas, file:PATH, dns:NAME:PORT) shows a fleet, one line for each node.

    The first paragraph is a summary since the start. Below, a storage node has hits, bandwidth, memory, devices,
    tenants and slowest commands; a data plane has fetches, stores, outcomes of calls and connected engines.

    Without --watch, rates are means since the server's start; with it, of each interval but the first. Each table names
    the values that count from the start. Tenants' rates are counted if they are limited.
    """
    host, port = login.pop("host"), login.pop("port")
    where = addresses or (host if host.startswith("unix:") or is_url(host) else join_address(host, port),)
    with contextlib.ExitStack() as opened:
        sources = [
            (each, opened.enter_context(contextlib.closing(source(each, login, watches=watch)))) for each in where
        ]
        _run(sources, interval_s=interval, count=count if watch else 1, as_json=as_json, live=watch)


class _StorageView:
    """Successive views of a storage node."""

    def __init__(self, login: Login, *, watches: bool) -> None:
        self._client = StorageClient(login)
        self._watcher = Watcher(watches=watches)
        self._summarizer = Summarizer()

    def step(self) -> dict[str, Any]:
        sample = Sample.read(self._client)
        summary = None if sample.other_server else summarized(self._summarizer, lambda: sample.samples)
        return self._watcher.step(sample) | {"summary": summary}

    def render(self, view: Mapping[str, Any], where: str) -> RenderableType:
        return _rendered(view, where, self._watcher)

    def close(self) -> None:
        self._client.close()


def source(where: str, login: Mapping[str, Any], *, watches: bool, server_name: str = "") -> Source:
    """Return the source of a program's statistics: the protocol tells which program it is.

    ``server_name``: name in its certificate, if it is another one than in ``where``.
    """
    if (given := given_members(where)) is not None:
        name = members.service_of(given)
        return FleetView(given, lambda node: _StorageView(Login.at(node, server_name=name, **login), watches=watches))
    if is_url(where):
        return MetricsWatcher(where, Login(host="", port=0, **login).context())
    credentials = None
    if login["tls_ca"]:
        files = {"certificate": login["tls_cert"], "key": login["tls_key"]}
        credentials = Credentials(authorities=login["tls_ca"], **files, server_name=server_name)
    protocol = "http2" if where.startswith("unix:") else "resp"
    storage = None if where.startswith("unix:") else Login.at(where, server_name=server_name, **login)
    try:
        own = {"certificate": login["tls_cert"], "key": login["tls_key"]}
        protocol = identify(where, encrypted=credentials is not None, **own).protocol
    except ConnectionRefusedError as error:
        if storage is not None:
            storage.context()  # unusable certificates are the first error
        raise StorageUnavailableError(
            f"cannot connect to {where}: {error.strerror}; is a storage node, a data plane or vLLM running there?"
        ) from error
    except (OSError, ValueError):
        pass  # the client reports the reason
    if protocol == "http2":
        return PlaneWatcher.connected(where, credentials)
    if protocol == "http1":
        return MetricsWatcher(f"http://{where}")
    assert storage is not None
    return _StorageView(storage, watches=watches)


def _run(sources: Sequence[tuple[str, Source]], *, interval_s: float, count: int, as_json: bool, live: bool) -> None:
    """Show ``count`` views of each program, 0 for no end, each in place of the previous one if ``live``."""
    console = Console()
    screen = Live(console=console, auto_refresh=False, screen=console.is_terminal and not as_json)
    with screen if live else contextlib.nullcontext():
        for number in itertools.count(1):
            views = [(where, each, each.step()) for where, each in sources]
            if as_json:
                for where, _, view in views:
                    click.echo(json.dumps({"where": where} | view))
            else:
                shown = Group(*(each.render(view, where) for where, each, view in views))
                screen.update(shown, refresh=True) if live else console.print(shown)
            if number == count:
                return
            try:
                time.sleep(interval_s)
            except KeyboardInterrupt:
                return

"""Answers "does it help?" for one program, from its metrics: sentences, what limits it now, and values to draw.

One model for the terminal (``shadowserve stats``), the web page of each program, and ``shadowserve ui``. The metrics
may come from a registry, from Prometheus text, from INFO or from the Statistics call: all have the same names.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from shadowserve.sizes import human_size

Kind = Literal["engine", "data plane", "storage node"]
Level = Literal["good", "idle", "warning", "bad"]
Unit = Literal["bytes", "tokens", "seconds", "ratio", ""]

PLUGIN: Final = "vllm:shadowserve_"
PLANE: Final = "shadowserve_"
STORAGE: Final = "shadowserve_storage_"
_PREFIXES: Final = (PLUGIN, PLANE, "process_start_time_seconds")
_VALUE_MAX: Final = 1e30
"""Larger values are not shown: their sums may not be finite."""
_NAME_MAX: Final = 64
"""Characters of a label's value that are shown."""
_WINDOW_S: Final = 10.0
"""Rates are of about this time."""
_SPACING_S: Final = 0.5
_REASONS_SHOWN: Final = 4
_LIST_MAX: Final = 64
_BUSY: Final = 0.7
"""Share of the time, or of a core, from which a part counts as the limit."""
_WAITING: Final = 0.1
"""Share of the time that work waits for the interference budget, from which the budget counts as the limit."""
_MOSTLY: Final = 0.5
_DECODED_S: Final = 1.0
"""Time of decode steps from which their slowdown is shown: single steps vary much more than the budget."""
_SAVED: Final = ("local", "loaded")
"""Values of ``prompt_tokens{reason}`` for tokens that were not computed."""
_WORDS: Final = {
    "local": "engine's own cache",
    "absent": "not stored",
    "short": "less than a chunk",
    "not_worth_it": "computing is faster, or too few tokens",
    "fell_short": "load incomplete",
    "off": "not looked up",
}
"""Words for reasons that the page explains; others are shown by name (docs/reference/failures.md)."""


class Samples:
    """The metrics of one program at one moment: values by name and labels."""

    def __init__(self, found: Iterable[tuple[str, Mapping[str, str], float]]) -> None:
        self._values: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for name, labels, value in found:
            if name.startswith(_PREFIXES) and not name.endswith("_bucket"):
                sound = math.isfinite(value) and abs(value) < _VALUE_MAX
                self._values.setdefault(name, []).append((labels, value if sound else 0.0))

    @classmethod
    def of(cls, families: Iterable[Any]) -> "Samples":
        """Return the samples of Prometheus' metric families: of a registry, or parsed from text."""
        return cls((each.name, each.labels, each.value) for family in families for each in family.samples)

    @classmethod
    def of_text(cls, text: str) -> "Samples":
        """Return the samples of Prometheus text; ValueError: it is malformed. Other programs' lines are not read."""
        ours = (line for line in text.split("\n") if line.startswith(_PREFIXES))
        try:
            return cls.of(text_string_to_metric_families("\n".join(ours)))
        except (ValueError, LookupError) as error:
            raise ValueError(f"its metrics are malformed: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def total(self, name: str) -> float:
        """Return the sum of a metric over its labels; 0 if there is none."""
        return sum(value for _, value in self._values.get(name, ()))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a metric by a label, the largest first."""
        sums: dict[str, float] = {}
        for labels, value in self._values.get(name, ()):
            key = labels.get(label, "")[:_NAME_MAX]
            sums[key] = sums.get(key, 0.0) + value
        return dict(sorted(sums.items(), key=lambda each: -each[1])[:_LIST_MAX])


@dataclass(frozen=True)
class Window:
    """The metrics now, and their change since an earlier moment or since the start."""

    now: Samples
    before: Samples
    prefix: str
    seconds: float  # length of the window; 0: unknown
    from_start: bool  # the window begins at the program's start

    def total(self, name: str) -> float:
        return self.now.total(self.prefix + name)

    def by(self, name: str, label: str = "reason") -> dict[str, float]:
        return self.now.by(self.prefix + name, label)

    def grown(self, name: str) -> float:
        """Return the increase of a counter in the window."""
        return max(0.0, self.total(name) - self.before.total(self.prefix + name))

    def grown_by(self, name: str, label: str = "reason") -> dict[str, float]:
        """Return the increases of a counter by a label, the largest first, without zeros."""
        before = self.before.by(self.prefix + name, label)
        grown = {key: value - before.get(key, 0.0) for key, value in self.by(name, label).items()}
        return dict(sorted(((key, each) for key, each in grown.items() if each > 0), key=lambda each: -each[1]))

    def share(self, name: str) -> float:
        """Return the increase of a counter of seconds for each second of the window."""
        return self.grown(name) / self.seconds if self.seconds else 0.0


class _Value(NamedTuple):
    """A value to show and to draw: a counter's rate, or a gauge."""

    name: str
    title: str
    unit: Unit
    read: Callable[[Window], float | None] | None = None  # None: the rate of the counter ``name``

    def shown(self, window: Window) -> dict[str, Any]:
        rate = self.read is None or self.unit == "tokens"
        value = self.read(window) if self.read is not None else window.share(self.name)
        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "rate": rate,
            "value": value,
            "text": "-" if value is None else text_of(value, self.unit) + ("/s" if rate else ""),
        }


def text_of(value: float, unit: Unit) -> str:
    """Return a number with its unit, for people."""
    if unit == "bytes":
        return human_size(value)
    if unit == "ratio":
        return f"{100 * value:.1f} %"
    if unit == "seconds":
        return _duration(value)
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _reasons(counts: Mapping[str, float], whole: float) -> str:
    """Return the largest shares by reason."""
    shown = list(counts.items())[:_REASONS_SHOWN]
    return ", ".join(f"{_WORDS.get(name, name)} {_percent(count, whole)}" for name, count in shown)


def _first(counts: Mapping[str, float]) -> str:
    name = next(iter(counts), "")
    return _WORDS.get(name, name)


def _found(part: float, whole: float, what: str) -> str:
    return f"{part:,.0f} of {whole:,.0f} {what} ({_percent(part, whole)})" if whole else f"no {what}"


def _stored(raw: float, stored: float) -> str:
    if not stored:
        return "stored nothing"
    return f"stored {human_size(raw)} as {human_size(stored)} ({raw / stored:.2f} times smaller)"


# ---- Engine ----------------------------------------------------------------------------------------------------------


def _computed(tokens: Mapping[str, float]) -> dict[str, float]:
    return {reason: count for reason, count in tokens.items() if reason not in _SAVED and count}


def _slowdown(window: Window) -> float | None:
    """Return the relative slowdown of decode steps beside transfers; None with too few such steps to tell."""
    predicted = window.grown("decode_during_fetch_predicted_seconds_total")
    return window.grown("decode_during_fetch_seconds_total") / predicted - 1 if predicted >= _DECODED_S else None


def _budget(window: Window) -> float:
    """Return the interference budget; engines of one program have the same."""
    return max(window.by("interference_budget_ratio", "engine").values(), default=0.0)


def _engine_text(window: Window) -> list[str]:
    tokens = window.by("prompt_tokens_total")
    whole, loaded, local = sum(tokens.values()), tokens.get("loaded", 0.0), tokens.get("local", 0.0)
    computed = _computed(tokens)
    saved, seconds = window.total("saved_prefill_seconds_total"), window.total("load_seconds_total")
    text = [
        f"{window.total('prompts_total'):,.0f} prompts with {whole:,.0f} tokens.",
        f"{loaded:,.0f} tokens ({_percent(loaded, whole)}) were loaded instead of computed, {local:,.0f} "
        f"({_percent(local, whole)}) were in the engine's own prefix cache.",
    ]
    if computed:
        text.append(f"{_percent(sum(computed.values()), whole)} were computed: {_reasons(computed, whole)}.")
    if saved:
        text.append(f"That saved {_duration(saved)} of prefill at this engine's measured speed; loads took "
                    f"{_duration(seconds)}, summed over ranks.")  # fmt: skip
    elif loaded:
        text.append("The saved prefill time is not known yet: this engine has measured too few computed prompts.")
    fetched, delivered = window.total("fetched_bytes_total"), window.total("delivered_bytes_total")
    raw, stored = window.total("stored_raw_bytes_total"), window.total("stored_bytes_total")
    text.append(f"Loaded {human_size(delivered)} from {human_size(fetched)} of records; {_stored(raw, stored)}.")
    budget = _budget(window)
    slower = _slowdown(Window(window.now, Samples(()), window.prefix, 0.0, True))
    if slower is None:
        text.append(f"Too few decode steps overlapped transfers to tell their slowdown (budget {100 * budget:g} %).")
    else:
        word = "slower" if slower >= 0 else "faster"
        text.append(f"Decode steps beside transfers were {abs(100 * slower):.1f} % {word} (budget {100 * budget:g} %).")
    return text


def _engine_limit(window: Window) -> tuple[Level, str]:
    tokens, failed = window.grown_by("prompt_tokens_total"), window.grown_by("lookup_failures_total")
    whole, budget = sum(tokens.values()), _budget(window)
    slower, computed = _slowdown(window), _computed(tokens)
    if window.grown("off_requests_total"):
        return "bad", "the plugin is off: every prompt is computed. The engine's log says why."
    if failed:
        mostly = sum(failed.values()) > _MOSTLY * window.grown("lookup_requests_total")
        level: Level = "bad" if mostly else "warning"
        return (
            level,
            f"{'' if mostly else 'some '}lookups get no answer: {_first(failed)} (docs/reference/failures.md).",
        )
    if short := window.grown_by("load_failures_total"):
        return "warning", f"loads fall short: {_first(short)} (docs/reference/failures.md)."
    if slower is not None and budget and slower > 2 * budget and window.grown("prompts_total"):
        return "warning", f"transfers slow decoding by {100 * slower:.1f} %, above the budget of {100 * budget:g} %."
    if not whole:
        return "idle", "no prompts."
    if sum(computed.values()) > _MOSTLY * whole and next(iter(computed)) not in ("short", "off"):
        return "warning", f"most tokens are computed: {_first(computed)}."
    ranks = max(1.0, window.grown("loaded_tokens_total") / max(tokens.get("loaded", 0.0), 1.0))
    if window.share("load_seconds_total") > _BUSY * ranks:
        return "warning", "loading takes most of the time: see what limits the data plane."
    return "good", "nothing."


_ENGINE: Final = (
    _Value("prompts_total", "Prompts", ""),
    _Value("loaded", "Tokens loaded", "tokens", lambda each: _per_s(each, ("loaded",))),
    _Value("local", "Tokens in the engine's own cache", "tokens", lambda each: _per_s(each, ("local",))),
    _Value("computed", "Tokens computed", "tokens", lambda each: _per_s(each, None)),
    _Value("saved_prefill_seconds_total", "Prefill saved", "seconds"),
    _Value("delivered_bytes_total", "Bytes loaded", "bytes"),
    _Value("stored_bytes_total", "Bytes stored", "bytes"),
    _Value("slowdown", "Slowdown of decoding", "ratio", _slowdown),
)


def _per_s(window: Window, reasons: tuple[str, ...] | None) -> float:
    tokens = window.grown_by("prompt_tokens_total")
    found = _computed(tokens) if reasons is None else {reason: tokens.get(reason, 0.0) for reason in reasons}
    return sum(found.values()) / window.seconds if window.seconds else 0.0


# ---- Data plane ------------------------------------------------------------------------------------------------------


def _plane_text(window: Window) -> list[str]:
    fetches, stores = window.by("fetches_total", "outcome"), window.by("stores_total", "outcome")
    whole, keys, hits = sum(fetches.values()), window.total("lookup_keys_total"), window.total("lookup_hits_total")
    failed = {name: count for name, count in fetches.items() if name != "complete" and count}
    fetched, tiers = window.total("fetched_bytes_total"), window.total("tier_bytes_total")
    raw, stored = window.total("stored_raw_bytes_total"), window.total("stored_bytes_total")
    missed = f", not complete: {_reasons(failed, whole)}" if failed else ""
    text = [
        f"{whole:,.0f} fetches{missed}; {sum(stores.values()):,.0f} stores.",
        f"Lookups found {_found(hits, keys, 'keys')}.",
        f"Read {human_size(fetched)} of records ({human_size(tiers)} from local tiers), delivered "
        f"{human_size(window.total('delivered_bytes_total'))}; {_stored(raw, stored)}.",
    ]
    waited, rate = window.total("interference_wait_seconds_total"), window.total("interference_rate_bytes_per_s")
    if engines := window.total("decoding_engines"):
        limit = f"{human_size(rate)}/s" if rate else "no limit"
        budget = 100 * window.total("interference_budget_ratio")
        text.append(f"{engines:,.0f} engines decode: budget {budget:g} %, {limit} now.")
    text.append(f"Transfers waited {_duration(waited)} for the interference budget.")
    return text


def _plane_limit(window: Window) -> tuple[Level, str]:
    stages = window.grown_by("stage_busy_seconds_total", "stage")
    busy = next(iter(stages.values()), 0.0) / window.seconds if window.seconds else 0.0
    rate = window.total("interference_rate_bytes_per_s")
    if not window.total("storage_up"):
        return "bad", "storage is not connected: every call is a miss."
    if window.total("tier_devices_gone"):
        return "warning", "a device of the tiers is gone."
    if window.share("interference_wait_seconds_total") > _WAITING:
        return "warning", f"the interference budget: {human_size(rate)}/s beside decoding."
    if busy > _BUSY:
        return "warning", f"CPU time of the stage {next(iter(stages))}: {busy:.1f} cores."
    if window.share("fetch_seconds_sum") > _BUSY:
        return "warning", "storage or the network: fetches wait for bytes."
    if window.total("fetch_queue_jobs"):
        return "warning", f"{window.total('fetch_queue_jobs'):,.0f} fetches wait for buffers."
    if not (window.grown("fetches_total") or window.grown("stores_total") or window.grown("lookups_total")):
        return "idle", "no calls."
    return "good", "nothing."


_PLANE: Final = (
    _Value("fetched_bytes_total", "Records read", "bytes"),
    _Value("delivered_bytes_total", "Bytes delivered", "bytes"),
    _Value("stored_bytes_total", "Records stored", "bytes"),
    _Value("lookup_hits_total", "Keys found", ""),
    _Value("fetches_total", "Fetches", ""),
    _Value("stage_busy_seconds_total", "Cores busy", "", lambda each: each.share("stage_busy_seconds_total")),
    _Value(
        "waiting", "Transfers waiting for the budget", "", lambda each: each.share("interference_wait_seconds_total")
    ),
    _Value("fetch_queue_jobs", "Waiting fetches", "", lambda each: each.total("fetch_queue_jobs")),
)

# ---- Storage node ----------------------------------------------------------------------------------------------------


def _storage_text(window: Window) -> list[str]:
    total = window.total
    lookup_hits, lookups = total("lookup_hits_total"), total("lookup_hits_total") + total("lookup_misses_total")
    reads, hits = total("hits_total") + total("misses_total") - lookups, total("hits_total") - lookup_hits
    used, budget = total("memory_used_bytes"), total("memory_budget_bytes")
    removed = window.by("evictions_total", "cause") or {"evicted": total("evicted_keys_total")}
    removed |= window.by("lost_objects_total", "reason") | {"expired": total("expired_keys_total")}
    causes = ", ".join(f"{name} {count:,.0f}" for name, count in list(removed.items())[:_LIST_MAX] if count)
    return [
        f"Reads found {_found(hits, reads, 'keys')}, lookups {_found(lookup_hits, lookups, 'keys')}.",
        f"Sent {human_size(total('sent_bytes_total'))}, received {human_size(total('received_bytes_total'))}.",
        f"{total('records'):,.0f} records use {human_size(used)} of {human_size(budget)} ({_percent(used, budget)}).",
        f"Removed keys: {causes or 'none'}.",
    ]


def _storage_limit(window: Window) -> tuple[Level, str]:
    total, grown = window.total, window.grown
    devices = window.by("device_healthy", "device")
    lost = [name for name, healthy in devices.items() if not healthy]
    for level, holds, text in (
        ("warning", not total("recovered") and STORAGE + "recovered" in window.now, "it is recovering its keys."),
        ("warning", total("draining"), "it is stopping."),
        ("bad", lost, f"out of use: {', '.join(lost)}."),
        ("bad", STORAGE + "s3_up" in window.now and not total("s3_up"), "the bucket cannot be reached."),
        ("warning", total("memory_waits"), "clients wait for memory (clients_memory_bytes)."),
        ("warning", grown("throttled_total"), "the rates of tenants."),
        ("warning", grown("busy_refusals_total"), "the devices: writers wait for them."),
        ("warning", window.share("cpu_seconds_total") > 2 * _BUSY, "CPU time of the node."),
        ("warning", grown("evicted_keys_total"),
         f"capacity: {grown('evicted_keys_total'):,.0f} keys were evicted to make room."),
        ("idle", not (grown("hits_total") or grown("misses_total") or grown("records_stored_total")), "no traffic."),
    ):  # fmt: skip
        if holds:
            return level, text  # type: ignore[return-value]
    return "good", "nothing."


_STORAGE: Final = (
    _Value("sent_bytes_total", "Sent", "bytes"),
    _Value("received_bytes_total", "Received", "bytes"),
    _Value("hits_total", "Keys found", ""),
    _Value("misses_total", "Keys not found", ""),
    _Value("evicted_keys_total", "Keys evicted", ""),
    _Value("memory_used_bytes", "Stored", "bytes", lambda each: each.total("memory_used_bytes")),
    _Value("clients", "Clients", "", lambda each: each.total("clients")),
)


class _Program(NamedTuple):
    kind: Kind
    known_by: str
    prefix: str
    text: Callable[[Window], list[str]]
    limit: Callable[[Window], tuple[Level, str]]
    values: tuple[_Value, ...]
    parts: tuple[str, str, str]  # title, metric and label of the counts to show as bars


_PROGRAMS: Final = (
    _Program("engine", PLUGIN + "prompts_total", PLUGIN, _engine_text, _engine_limit, _ENGINE,
             ("Tokens of prompts", "prompt_tokens_total", "reason")),
    _Program("storage node", STORAGE + "hits_total", STORAGE, _storage_text, _storage_limit, _STORAGE,
             ("Removed keys", "evictions_total", "cause")),
    _Program("data plane", PLANE + "batches_total", PLANE, _plane_text, _plane_limit, _PLANE,
             ("Fetches", "fetches_total", "outcome")),
)  # fmt: skip


@dataclass
class Summarizer:
    """Makes summaries of successive samples of one program. Thread-safe."""

    _history: deque[tuple[float, float, Samples]] = field(default_factory=lambda: deque(maxlen=64))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def step(self, samples: Samples, now_s: float, wall_s: float) -> dict[str, Any]:
        """Return the summary of new samples as JSON-compatible data.

        Args:
            now_s: Monotonic time of the samples.
            wall_s: Time of the same moment since the epoch, for programs that export when they started.

        Raises:
            ValueError: The samples are of none of the programs.
        """
        program = next((each for each in _PROGRAMS if each.known_by in samples), None)
        if program is None:
            raise ValueError("it exports no metrics of ShadowServe; a vLLM engine does with the plugin configured")
        up_s = samples.total(program.prefix + "up_seconds")
        if not up_s and "process_start_time_seconds" in samples:
            up_s = max(0.0, wall_s - samples.total("process_start_time_seconds"))
        with self._lock:
            while self._history and up_s < self._history[-1][1]:
                self._history.popleft()  # of the time before a restart
            while len(self._history) > 1 and now_s - self._history[1][0] >= _WINDOW_S:
                self._history.popleft()
            before_s, _, before = self._history[0] if self._history else (now_s - up_s, 0.0, Samples(()))
            window = Window(samples, before, program.prefix, now_s - before_s, not self._history)
            if not self._history or now_s - self._history[-1][0] >= _SPACING_S:
                self._history.append((now_s, up_s, samples))
        level, limit = program.limit(window)
        title, metric, label = program.parts
        counts = {name: count for name, count in window.by(metric, label).items() if count}
        up = f"In {_duration(up_s)}: " if up_s else ""
        when = "since the start" if window.from_start else "now"
        return {
            "kind": program.kind,
            "up_s": up_s,
            "window_s": window.seconds,
            "when": when,
            "paragraph": up + " ".join(program.text(window)),
            "level": level,
            "limit_line": f"What limits {when}: {limit}",
            "values": [value.shown(window) for value in program.values],
            "parts": {"title": title, "counts": {_WORDS.get(name, name): count for name, count in counts.items()}},
        }

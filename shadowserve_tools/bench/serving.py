"""Measures real vLLM with ShadowServe, with LMCache and without a cache: times to first token, and the cost of storing.

Method: vLLM runs on one half of the cores; stores and servers of all systems on the other. Every system computes
documents of 2,048 tokens once and keeps them; then its engine is restarted and gets requests for the same documents.
Systems: no cache; ShadowServe with defaults (``layer_order: auto``, with learnt times), with whole loads only, from
a memory tier of the engine's host, and with ``quantizer: near_lossless``, whose steps give the random model's KV the
3.6 bits an element that ``bench quality`` measures on a real model; LMCache's multiprocess server with its CPU tier or
with Redis (its memory emptied before each question), with the flags that a host without a GPU needs, and in its
strongest mode (shared memory, one more worker, tuned Redis). Stores are on loopback, and behind links of 1 and 4
Gbit/s. A few engines run at a time, since all of them need too much memory: those of ShadowServe with plain vLLM, then
each mode of LMCache beside ShadowServe's. These systems take turns document by document, in both orders; a ratio
compares only requests of such turns. All answers but those of ``near_lossless`` must be equal, one question at a time;
where conversations arrive at a rate, the numbers of computed tokens are compared instead. ``fill_over_off`` compares
storing with not storing within one engine; two processes of plain vLLM differ by more than that
(``fill_over_plain_idle``). The limit of a ratio is the link, or writing the KV to memory once, and computing the last
tokens. Between ``ttft_over_recompute`` and its limit lie the lookup, the engine's steps that find and end the load,
receiving and decompressing, and scattering: the columns of the row with whole loads.

Prediction: a first token takes 145 ms, 0.053 of computing. ``ttft_over_lmcache`` 0.13, ``_local`` 0.17, ``_link``
0.45; ``_shm`` 0.35, ``_local_shm`` 1, ``_link_shm`` 0.65. Whole loads 1.4 of the default, over 1 Gbit/s
1.07; the memory tier 0.8. ``fill_over_off`` 1.02.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from shadowserve.cores import usable_cores
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.fetch import peers_option
from shadowserve_tools.bench.parts.kernels import memory
from shadowserve_tools.bench.parts.options import benchmark, real, repeats_option, whole
from shadowserve_tools.bench.parts.serving import (
    TAIL_TOKENS,
    Engine,
    Host,
    Load,
    Model,
    arrivals,
    check_cached,
    check_depends,
    made_up,
    model_options,
    write_calibration,
    write_model,
)
from shadowserve_tools.bench.parts.systems import (
    LOCAL,
    LOCAL_SHM,
    OFF,
    OURS,
    OURS_NEAR,
    OURS_TIER,
    OURS_WHOLE,
    REDIS,
    REDIS_SHM,
    Answers,
    System,
    ours,
    peers,
)
from shadowserve_tools.bench.peers.network import LOOPBACK, TCP_SHARE, Link, Network, linked
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, cpu_s, over, timed
from shadowserve_tools.trace import record

COLUMNS: Final = [
    "what", "link_Gbit_per_s", "system", "ttft_ms", "tpot_ms", "request_ms", "tokens_per_s", "cpu_s", "blocked_ms",
    "lookup_ms", "allocation_ms", "fetch_ms", "scatter_ms", "retrieval_ms", "last_ms", "note",
]  # fmt: skip
TIMES: Final = ("ttft", "tpot", "request", "blocked", "lookup", "allocation", "retrieval", "last")
"""Times of a result, in seconds there and in milliseconds in the table."""
IDLE: Final = "ShadowServe, idle"
"""The engine of ``OURS`` while its plugin stores nothing, and no prompt waits for its lookup; that is still sent."""
FILLING: Final = "filling"
ALONE: Final = "alone"
ARRIVING: Final = "arriving"
SLOWEST: Final = -1.0
"""Stands for the slowest link."""
RATIOS: Final = (
    ("ttft_over_lmcache", ALONE, 0.0, OURS, REDIS, "at most 0.15; LMCache over Redis, defaults"),
    ("ttft_over_lmcache_local", ALONE, 0.0, OURS, LOCAL, "at most 0.2; our remote store, its CPU tier"),
    ("ttft_over_lmcache_link", ALONE, SLOWEST, OURS, REDIS, "at most 0.25; at {:g} Gbit/s"),
    ("ttft_near_lossless_over_lossless_link", ALONE, SLOWEST, OURS_NEAR, OURS, "at most 0.4; at {:g} Gbit/s"),
    ("ttft_near_lossless_over_lmcache_link", ALONE, SLOWEST, OURS_NEAR, REDIS, "at most 0.16; at {:g} Gbit/s"),
    ("ttft_over_lmcache_shm", ALONE, 0.0, OURS, REDIS_SHM, "none; its strongest mode"),
    ("ttft_over_lmcache_local_shm", ALONE, 0.0, OURS, LOCAL_SHM, "none; its strongest mode"),
    ("ttft_over_lmcache_link_shm", ALONE, SLOWEST, OURS, REDIS_SHM, "none; its strongest mode"),
    ("ttft_over_recompute", ALONE, 0.0, OURS, OFF, "at most 0.06"),
    ("ttft_over_recompute_arriving", ARRIVING, 0.0, OURS, OFF, "none; with what waits in between"),
    ("ttft_whole_over_default", ALONE, 0.0, OURS_WHOLE, OURS, "none; `layer_order: false`"),
    ("ttft_whole_over_default_link", ALONE, SLOWEST, OURS_WHOLE, OURS, "none; `layer_order: false`"),
    ("ttft_tier_over_default", ALONE, 0.0, OURS_TIER, OURS, "none; this host's memory, remote store"),
    ("ttft_tier_over_lmcache_local_shm", ALONE, 0.0, OURS_TIER, LOCAL_SHM, "at most 0.8; both in this host's memory"),
    ("ttft_tier_over_recompute", ALONE, 0.0, OURS_TIER, OFF, "none; this host's memory"),
    ("fill_over_off", FILLING, 0.0, OURS, IDLE, "at most 1.03; of one engine, storing and not"),
    ("fill_over_plain", FILLING, 0.0, OURS, OFF, "none; of two processes"),
    ("fill_over_plain_idle", FILLING, 0.0, IDLE, OFF, "none; how far two processes are apart of which neither stores"),
    ("fill_over_plain_lmcache", FILLING, 0.0, REDIS, OFF, "none; of two processes, LMCache over Redis"),
    ("fill_over_plain_lmcache_shm", FILLING, 0.0, REDIS_SHM, OFF, "none; of two processes, its strongest mode"),
)
"""Name, what was measured, the link's rate, two systems and the goal."""
_FETCHES_MAX: Final = 1000
"""Most fetches of a recording, which ends by time."""
FILLING_TOGETHER: Final = ((OFF, OURS), (OFF, OURS_NEAR), (OFF, LOCAL, REDIS), (OFF, LOCAL_SHM, REDIS_SHM))
NEAR_TOGETHER: Final = (
    (OFF, OURS, OURS_WHOLE, OURS_TIER), (OURS, LOCAL, REDIS), (OURS, OURS_TIER, LOCAL_SHM, REDIS_SHM),
)  # fmt: skip
FAR_TOGETHER: Final = ((OURS, OURS_WHOLE, OURS_NEAR), (OURS, OURS_NEAR, REDIS), (OURS, REDIS_SHM))
"""Systems whose engines run at the same time."""
WRITES: Final = 15
"""Number of writes; their median counts."""
AWAKENING_TOKENS: Final = 8
"""Output tokens of the warm-up request before each measured one."""
_LEARNT_CHUNKS: Final = (1, 2, 4)
"""Chunks of prompts that an engine computes before it is measured."""
_LEARNT_LOADS: Final = 8
_WARM_UP: Final = 1 << 20
"""First seed of prompts that no measured request uses."""
_QUESTIONS: Final = 1 << 10
"""First seed of questions."""


@dataclass
class _Results:
    """Results of requests.

    Attributes:
        requests: Results by what was measured, the link's rate (0: loopback) and the system, in the same order for
            each system of a ``group``. Requests that arrive at a rate have ``cpu_s`` and ``tokens_per_s`` of their run.
        fetching: Part of the retrieval in which ShadowServe's data plane fetched, by the link's rate.
        link_s: Time of the link alone for a document's bytes, by the link's rate and the system.
        over_link: Duration of the data plane's fetch over that.
        writing_s: Time of writing a document's KV to memory.
    """

    requests: dict[tuple[str, float, str], list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    fetching: dict[float, float] = field(default_factory=dict)
    link_s: dict[tuple[float, str], float] = field(default_factory=dict)
    over_link: dict[float, float] = field(default_factory=dict)
    writing_s: float = 0.0

    def add(self, what: str, rate: float, system: str, group: int, result: dict[str, Any]) -> None:
        self.requests[what, rate, system].append(result | {"group": group})

    def pairs(self, what: str, rate: float, *systems: str) -> list[tuple[dict[str, Any], ...]]:
        """Return the results of requests about the same question in the same turn, one of each system."""
        found = [self.requests.get((what, rate, system), []) for system in systems]
        groups = sorted({result["group"] for result in found[0]})
        each = ([[result for result in results if result["group"] == group] for results in found] for group in groups)
        return [pair for one in each for pair in zip(*one, strict=False)]

    def limits(self, rate: float, own: str, others: str) -> list[float]:
        """Return the limit of a first token's ratio: only the unavoidable parts take time.

        These are the link, or writing the document's KV to memory, whichever takes longer, and then the last tokens.
        """
        last_s = statistics.median(result["last_s"] for result in self.requests[ALONE, rate, OURS_WHOLE])
        recorded = OURS_NEAR if own == OURS_NEAR else OURS_WHOLE
        moved = max(self.link_s.get((rate, recorded), 0.0), self.writing_s)
        return [(moved + last_s) / result["ttft_s"] for result in self.requests.get((ALONE, rate, others), [])]


@benchmark(*COLUMNS, bars=["ttft_ms"])
@model_options(chunks=8, running_max=4)
@whole("--output-tokens", 16, "Tokens of an answer.", 2, 128)
@real("--rate", 0.25, "Conversations per second, when they arrive at a rate.", 0.01, 100)
@real("--link links", (1.0, 4.0), "Rate of the link between engine and stores, in Gbit/s; repeatable.", 0.1, 100)
@whole("--fills", 16, "Documents to compute without a cache and with ShadowServe, at least --documents.")
@repeats_option(2, "Questions about each document, for each link.")
@whole("--rounds", 1, "Turns with conversations that arrive at a rate.")
@peers_option
def serving(
    report: Report, programs: Programs, model: Model, load: Load, output_tokens: int, rate: float,
    links: Sequence[float], fills: int, repeats: int, rounds: int, peers_python: Path,
) -> None:  # fmt: skip
    """Compare real vLLM with ShadowServe, with LMCache and without a cache."""
    load = replace(load, output=output_tokens, rate=rate, requests=load.documents)
    progress = programs.progress(None)
    network, why_not = _network(programs, links)
    host = Host(programs, programs.logs, model, load, network)
    results = _Results(writing_s=_writing_s(host.document_bytes))
    bench = _Bench(host, results, progress, repeats, rounds)
    absent = bench.start(peers_python) | ({"a link": why_not} if why_not else {})
    bench.fill(max(fills, load.documents))
    bench.measure(links)
    _report(report, results, absent, min(links, default=0.0))


def _network(stack: ExitStack, links: Sequence[float]) -> tuple[Network, str]:
    """Return a link, or loopback and the reason for it."""
    if not links:
        return LOOPBACK, ""
    try:
        return stack.enter_context(linked()), ""
    except ShadowServeError as error:
        return LOOPBACK, str(error)


def _writing_s(size: int) -> float:
    """Return the time in which all cores together write ``size`` bytes of memory."""
    cores = len(usable_cores())
    parts = np.array_split(memory(size), cores)
    with ThreadPoolExecutor(cores) as pool:
        return statistics.median(timed(lambda: list(pool.map(lambda part: part.fill(1), parts))) for _ in range(WRITES))


class _Bench:
    def __init__(
        self, host: Host, results: _Results, progress: Callable[[str], None], repeats: int, rounds: int
    ) -> None:
        self._host, self._load = host, host.load
        self._results, self._progress = results, progress
        self._repeats, self._rounds = repeats, rounds
        self._systems: list[System] = []
        self._plain: Engine
        self._answers = Answers()

    def start(self, peers_python: Path) -> dict[str, str]:
        """Start all programs but engines with a cache; return the reason of each absent system by name."""
        write_model(self._host.folder, self._host.model, self._load)
        self._progress("starting servers")
        size = self._load.documents * self._host.document_bytes
        more, absent = peers(self._host, peers_python, size)
        calibration = self._host.folder / "near_lossless.calibration"
        write_calibration(self._host.folder, calibration)
        self._systems = [*ours(self._host, calibration), *more]
        self._progress("starting the engine without a cache")
        self._plain = self._engine(self._host.stack, System(), "plain")
        self._ask(self._plain, _WARM_UP, 0)
        check_depends(*(self._ask(self._plain, document, 0)["answer"] for document in (0, _WARM_UP)))
        return absent

    def _engine(self, stack: ExitStack, system: System, name: str) -> Engine:
        # With and without a cache, the tokens after the document are computed in a step of their own: their sums have
        # the same order.
        steps: dict[str, Any] = {"max_num_batched_tokens": self._load.chunks * DEFAULT_CHUNK_TOKENS}
        with system.side():
            return self._host.start_engine(name, system.transfer, stack, packages=system.packages, **steps)

    def _order(self, document: int, question: int, at: float = 0.0) -> dict[str, Any]:
        tokens = made_up(self._load.chunks * DEFAULT_CHUNK_TOKENS, document)
        tokens += made_up(TAIL_TOKENS, _QUESTIONS + question)
        return {"prompt": tokens, "output": self._load.output, "at": at}

    def _ask(self, engine: Engine, document: int, question: int) -> dict[str, Any]:
        return engine.ask(self._order(document, question)["prompt"], self._load.output)

    def _measured(
        self, system: System, engine: Engine, document: int, question: int, cached: int, stored: int = 0
    ) -> dict[str, Any]:
        """Return the result of a question, after a short prompt that does not count.

        After another engine's turn all of its data comes from memory, as never in operation.
        """
        engine.ask(made_up(TAIL_TOKENS, _WARM_UP), AWAKENING_TOKENS)
        begin = _cpu(engine, system)
        with _idle(engine) if system.name == IDLE else nullcontext():
            result = self._ask(engine, document, question)
        if stored:
            system.stored(engine, stored)
        result["cpu_s"] = _cpu(engine, system) - begin
        self._answers.check(system, document, question, result, cached)
        return result

    def fill(self, fills: int) -> None:
        """Compute and keep every document with every system, in turns."""
        near = [system for system in self._systems if system.fills and not system.linked]
        for number, systems in _running(FILLING_TOGETHER, [System(), *near]):
            with ExitStack() as stack:
                engines = self._started(stack, systems, f"filling-{number}")
                # Two processes differ by more than storing costs.
                engines += [(replace(system, name=IDLE), engine) for system, engine in engines if system.name == OURS]
                for system, engine in engines:
                    self._ask(engine, _WARM_UP + 1, 0)
                    system.stored(engine, self._load.chunks)
                # More documents for a ratio of one per cent.
                often = any(system.name == OURS for system in systems)
                for document in range(fills if often else self._load.documents):
                    self._progress("filling")
                    for system, engine in engines if document % 2 else reversed(engines):
                        result = self._measured(system, engine, document, 0, 0, (document + 2) * self._load.chunks)
                        self._results.add(FILLING, 0.0, system.name, number, result)

    def measure(self, links: Sequence[float]) -> None:
        """Restart the engines and ask about the documents again: next to the stores, then over links."""
        for far, rates, together in ((False, (0.0,), NEAR_TOGETHER), (True, links, FAR_TOGETHER)):
            there = [*([] if far else [System()]), *(system for system in self._systems if system.linked == far)]
            for number, systems in _running(together, there if rates else []):
                with ExitStack() as stack:
                    turns = self._started(stack, systems, f"measured-{number}")
                    for system, engine in turns:  # open connections, and touch memory for the first time
                        system.forget()
                        self._ask(engine, 0, 0)
                    for rate in rates:
                        self._at(rate, number, turns)

    def _started(self, stack: ExitStack, systems: Sequence[System], name: str) -> list[tuple[System, Engine]]:
        self._progress("starting engines")
        return [
            (system, self._engine(stack, system, f"{name}-{index}") if system.transfer else self._plain)
            for index, system in enumerate(systems)
        ]

    def _teach(self, system: System, engine: Engine) -> None:
        """Let an engine measure how long computing takes, and loads of this rate."""
        engine.call("reading", only=True)
        for chunks in _LEARNT_CHUNKS:
            tokens = min(chunks, self._load.chunks) * DEFAULT_CHUNK_TOKENS
            engine.ask(made_up(tokens, _WARM_UP + 1 + chunks))
        for number in range(max(_LEARNT_LOADS, self._load.documents)):
            system.forget()
            self._ask(engine, number % self._load.documents, 0)
        engine.call("reading", only=False)

    def _at(self, rate: float, group: int, turns: Sequence[tuple[System, Engine]]) -> None:
        if rate:
            assert isinstance(self._host.network, Link)
            self._host.network.limit(rate)
        for system, engine in turns:
            if system.learns:
                self._teach(system, engine)
        for number in range(self._repeats):
            self._progress(f"asking over {rate:g} Gbit/s" if rate else "asking")
            for document in range(self._load.documents):
                for system, engine in turns if (document + number) % 2 else reversed(turns):
                    system.forget()
                    result = self._measured(system, engine, document, 1 + number, self._cached(system))
                    self._results.add(ALONE, rate, system.name, group, result)
        for system, engine in turns:
            if system.name in (OURS_WHOLE, OURS_NEAR):
                self._progress("recording")
                self._record(rate, system, engine)
        for number in range(0 if rate else self._rounds):
            for system, engine in turns if number % 2 else reversed(turns):
                self._progress(f"asking at {self._load.rate:g}/s")
                self._arriving(group, system, engine, number)

    def _cached(self, system: System) -> int:
        return self._load.chunks * DEFAULT_CHUNK_TOKENS if system.transfer else 0

    def _arriving(self, group: int, system: System, engine: Engine, number: int) -> None:
        load, question = self._load, 1 + self._repeats + number
        times = arrivals(load.requests, load.rate, number)
        orders = [self._order(document, question, at) for document, at in enumerate(times)]
        system.forget()
        begin = _cpu(engine, system)
        served = engine.call("serve", requests=orders)
        cost = (_cpu(engine, system) - begin) / len(served)
        seconds = max(result["end_s"] for result in served)
        for document, result in enumerate(served):
            # The requests of a batch depend on their arrival, and the rounding of bfloat16 sums on the batch: later
            # tokens may differ from run to run, in the same system.
            check_cached(result, self._cached(system), f"{system.name}, a question about document {document}")
            more = {"cpu_s": cost, "tokens_per_s": load.output * len(served) / seconds}
            self._results.add(ARRIVING, 0.0, system.name, group, result | more)

    def _record(self, rate: float, system: System, engine: Engine) -> None:
        """Ask about each document once more, and record how long the data plane fetches."""
        results, found = self._results, list[dict[str, Any]]()

        def ask() -> None:
            found.extend(self._ask(engine, document, 0) for document in range(self._load.documents))

        asked = results.requests[ALONE, rate, system.name][-self._repeats * self._load.documents :]
        seconds = 1 + 2 * sum(result["end_s"] for result in asked) / self._repeats
        spans, _ = record(system.data_plane, seconds, _FETCHES_MAX, ask)
        fetching = sum(span.end_ns - span.begin_ns for span in spans if span.step == "fetch") / 1e9
        if system.name == OURS_WHOLE:
            results.fetching[rate] = fetching / sum(result["retrieval_s"] for result in found)
        if rate:
            received = sum(span.output_bytes for span in spans if span.step == "net")
            results.link_s[rate, system.name] = received * 8 / (TCP_SHARE * rate * 1e9) / len(found)
        if rate and system.name == OURS_WHOLE:
            results.over_link[rate] = fetching / len(found) / results.link_s[rate, system.name]


def _running(together: Sequence[Sequence[str]], there: Sequence[System]) -> Iterator[tuple[int, list[System]]]:
    """Yield the groups of systems that run at the same time, with their numbers, if one of them was in none before."""
    named, before = {system.name: system for system in there}, set[str]()
    for number, names in enumerate(together):
        group = [named[name] for name in names if name in named]
        if not before.issuperset(system.name for system in group):
            before |= {system.name for system in group}
            yield number, group


@contextmanager
def _idle(engine: Engine) -> Iterator[None]:
    """Switch storing and waiting for lookups off while the context lasts."""
    engine.call("hits", way="compute")
    engine.call("reading", only=True)
    try:
        yield
    finally:
        engine.call("hits", way="decide")
        engine.call("reading", only=False)


def _cpu(engine: Engine, system: System) -> float:
    return sum(map(cpu_s, [psutil.Process(engine.process.pid), *system.processes]))


def _report(report: Report, results: _Results, absent: dict[str, str], slowest: float) -> None:
    for (what, rate, system), requests in results.requests.items():
        row = _row(requests)
        if system == OURS_WHOLE and what == ALONE:
            row["fetch_ms"] = results.fetching[rate] * row["retrieval_ms"]
            row["scatter_ms"] = row["retrieval_ms"] - row["fetch_ms"]
        link = {"link_Gbit_per_s": rate} if rate else {}
        report.row(what=what, **link, system=system, **row)
    for system, reason in absent.items():
        report.row(system=system, note=reason)
    for name, what, rate, own, other, goal in RATIOS:
        rate = slowest if rate == SLOWEST else rate
        figure = "request_s" if what == FILLING else "ttft_s"
        if pairs := results.pairs(what, rate, own, other):
            limits = results.limits(rate, own, other) if what == ALONE and own in (OURS, OURS_NEAR, OURS_TIER) else ()
            both = zip(*([result[figure] for result in pair] for pair in pairs), strict=True)
            report.ratio(name, over(*both), goal.format(slowest), limits)
    for rate, ratio in results.over_link.items():
        report.ratio(f"fetch_over_link_{rate:g}", [ratio], "none; the link alone takes 1")


def _row(requests: list[dict[str, Any]]) -> dict[str, Any]:
    figures = {f"{name}_s": (f"{name}_ms", 1e3) for name in TIMES}
    figures |= {name: (name, 1.0) for name in ("tokens_per_s", "cpu_s")}
    return {
        column: statistics.median(request[name] for request in requests if name in request) * scale
        for name, (column, scale) in figures.items()
        if any(name in request for request in requests)
    }

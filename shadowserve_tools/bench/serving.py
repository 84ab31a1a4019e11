"""Measures real vLLM with ShadowServe, with LMCache and without a cache: times to first token, and the cost of storing.

Method: vLLM runs on one half of the cores; stores and servers of all systems on the other. Every system computes
documents of 2,048 tokens once and keeps them; then its engine is restarted and gets requests for the same documents.
Systems: no cache; ShadowServe with defaults, and layer by layer; LMCache's multiprocess server with its CPU tier or
with Redis (its memory emptied before each question), with the flags that a host without a GPU needs, and in its
strongest mode (shared memory, one more worker, tuned Redis). Stores are on loopback, and behind links of 1 and 4
Gbit/s. Systems take turns document by document, in both orders. All answers must be equal, one question at a time;
where conversations arrive at a rate, the numbers of computed tokens are compared instead. ``fill_over_off`` compares
storing with not storing within one engine; two processes of plain vLLM differ by more than that
(``fill_over_plain_idle``). The limit of a ratio is the link, or writing the KV to memory once, and computing the last
tokens.

Prediction: a first token takes 145 ms, 0.053 of computing. ``ttft_over_lmcache`` 0.13, ``_local`` 0.17, ``_link``
0.45; ``_shm`` 0.35, ``_local_shm`` 1, ``_link_shm`` 0.65. Layer by layer 0.6 to 0.7, over 1 Gbit/s 0.93.
``fill_over_off`` 1.02.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import psutil

from shadowserve.cores import on_cores, usable_cores
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.fetch import peers_option
from shadowserve_tools.bench.parts.engine import prompt
from shadowserve_tools.bench.parts.kernels import memory
from shadowserve_tools.bench.parts.serving import (
    TAIL_TOKENS,
    VOCABULARY,
    Engine,
    Load,
    Model,
    Partition,
    arrivals,
    model_options_with,
    started_engine,
    write_model,
)
from shadowserve_tools.bench.parts.systems import (
    LOCAL,
    LOCAL_SHM,
    OFF,
    OURS,
    OURS_LAYERS,
    REDIS,
    REDIS_SHM,
    Answers,
    Site,
    System,
    check_cached,
    ours,
    peers,
)
from shadowserve_tools.bench.peers.network import LOOPBACK, Link, Network, linked
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Output, Report, cpu_s, output_options
from shadowserve_tools.trace import record

STEPS: Final = ("lookup", "allocation", "retrieval", "last")
COLUMNS: Final = [
    "what", "link_Gbit_per_s", "system", "ttft_ms", "tpot_ms", "request_ms", "tokens_per_s", "cpu_s", "blocked_ms",
    "lookup_ms", "allocation_ms", "fetch_ms", "scatter_ms", "retrieval_ms", "last_ms", "note",
]  # fmt: skip
IDLE: Final = "ShadowServe, idle"
"""The engine of ``OURS`` while its plugin stores nothing, and no prompt waits for its lookup; that is still sent."""
FILLING: Final = "filling"
ALONE: Final = "alone"
ARRIVING: Final = "arriving"
_FETCHES_MAX: Final = 1000
"""Most fetches of a recording, which ends by time."""
_TCP_SHARE: Final = 0.957
"""Part of a link's rate that TCP carries."""
WRITES: Final = 15
"""Number of writes; their median counts."""
AWAKENING_TOKENS: Final = 8
"""Output tokens of the warm-up request before each measured one."""
_WARM_UP: Final = 1 << 20
"""First seed of prompts that no measured request uses."""
_QUESTIONS: Final = 1 << 10
"""First seed of questions."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Options of :func:`serving`."""

    load: Load
    links: Sequence[float]
    fills: int
    repeats: int
    rounds: int


@dataclass
class _Results:
    """Results of requests.

    Attributes:
        requests: Results by what was measured, the link's rate (0: loopback) and the system, in the same order for
            each. Requests that arrive at a rate have ``cpu_s`` and ``tokens_per_s`` of their run.
        fetching: Part of the retrieval in which ShadowServe's data plane fetched, by the link's rate.
        link_s: Time of the link alone for a document's bytes.
        over_link: Duration of the data plane's fetch over that.
        writing_s: Time of writing a document's KV to memory.
    """

    requests: dict[tuple[str, float, str], list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    fetching: dict[float, float] = field(default_factory=dict)
    link_s: dict[float, float] = field(default_factory=dict)
    over_link: dict[float, float] = field(default_factory=dict)
    writing_s: float = 0.0

    def pairs(self, what: str, rate: float, ours: str, others: str, name: str = "ttft_s") -> list[float]:
        """Return one system's figures over another's, request by request; empty if one is missing."""
        own, theirs = (self.requests.get((what, rate, system), []) for system in (ours, others))
        return [mine[name] / its[name] for mine, its in zip(own, theirs, strict=False)]

    def limits(self, rate: float, others: str) -> list[float]:
        """Return the limit of a first token's ratio: only the unavoidable parts take time.

        These are the link, or writing the document's KV to memory, whichever takes longer, and then the last tokens.
        """
        own, theirs = (self.requests.get((ALONE, rate, system), []) for system in (OURS, others))
        moved = max(self.link_s.get(rate, 0.0), self.writing_s)
        return [(moved + mine["last_s"]) / its["ttft_s"] for mine, its in zip(own, theirs, strict=False)]


@click.command()
@model_options_with(chunks=8, requests_max=4)
@click.option(
    "--output-tokens", default=16, show_default=True, type=click.IntRange(2, 128), help="Tokens of an answer."
)
@click.option(
    "--rate", default=0.25, show_default=True, type=click.FloatRange(0.01, 100),
    help="Conversations per second, when they arrive at a rate.",
)  # fmt: skip
@click.option(
    "--link", "links", default=(1.0, 4.0), show_default=True, multiple=True, type=click.FloatRange(0.1, 100),
    help="Rate of the link between engine and stores, in Gbit/s; repeatable.",
)  # fmt: skip
@click.option(
    "--fills", default=16, show_default=True, type=click.IntRange(1),
    help="Documents to compute without a cache and with ShadowServe, at least --documents.",
)  # fmt: skip
@click.option(
    "--repeats",
    default=2,
    show_default=True,
    type=click.IntRange(1),
    help="Questions about each document, for each link.",
)
@click.option(
    "--rounds",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Turns with conversations that arrive at a rate.",
)
@peers_option
@output_options
def serving(
    output: Output,
    model: Model,
    load: Load,
    requests_max: int,
    output_tokens: int,
    rate: float,
    links: Sequence[float],
    fills: int,
    repeats: int,
    rounds: int,
    peers_python: Path,
) -> None:
    """Compare real vLLM with ShadowServe, with LMCache and without a cache."""
    load = replace(load, output=output_tokens, rate=rate, requests=load.documents)
    plan = _Plan(load=load, links=links, fills=max(fills, load.documents), repeats=repeats, rounds=rounds)
    results = _Results(writing_s=_writing_s(load.chunks * DEFAULT_CHUNK_TOKENS * model.kv_bytes))
    with Programs() as programs:
        progress = programs.progress(None)
        network, why_not = _network(programs, links)
        bench = _Bench(programs.logs, model, plan, requests_max, network, peers_python)
        absent = bench.start(programs, progress) | ({"a link": why_not} if why_not else {})
        bench.fill(results, progress)
        bench.measure(results, progress)
    _report(results, absent, plan).finish(output)


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
    cores, found = len(usable_cores()), []
    parts = np.array_split(memory(size), cores)
    with ThreadPoolExecutor(cores) as pool:
        for number in range(WRITES):
            begin = time.perf_counter()
            list(pool.map(lambda part, value=number: part.fill(value), parts))
            found.append(time.perf_counter() - begin)
    return statistics.median(found)


class _Bench:
    """All running programs.

    Args:
        folder: Folder of the model and of logs.
        model: Shape of the engine's model.
        plan: Options.
        requests_max: Number of requests that an engine runs at one time.
        network: Network between engines and stores.
        peers_python: Python of the peers' environment.
    """

    def __init__(
        self, folder: Path, model: Model, plan: _Plan, requests_max: int, network: Network, peers_python: Path
    ) -> None:
        self._model = model
        self._plan = plan
        self._load = plan.load
        self._requests_max = requests_max
        self._network = network
        kv = plan.load.chunks * plan.load.documents * DEFAULT_CHUNK_TOKENS * model.kv_bytes
        self._site = Site(folder, Partition.halves(), network, peers_python, kv)
        self._systems: list[System] = []
        self._plain: Engine
        self._answers = Answers()

    def start(self, stack: ExitStack, progress: Progress) -> dict[str, str]:
        """Start all programs but engines with a cache; return the reason of each absent system by name."""
        site, load = self._site, self._load
        # Keep the benchmark's own threads off the engine's cores.
        stack.enter_context(on_cores(site.partition.data_plane))
        write_model(site.folder, self._model, load)
        progress("starting servers")
        self._systems = ours(stack, site)
        more, absent = peers(stack, site)
        self._systems += more
        progress("starting engines")
        self._plain = stack.enter_context(self._engine(System(), "plain"))
        self._plain.call("serve", requests=self._orders(_WARM_UP, 0))
        same = [self._ask(self._plain, document, 0)["answer"] for document in (0, _WARM_UP)]
        if same[0] == same[1]:
            raise ShadowServeError("the answer does not depend on the document: equal answers would show nothing")
        return absent

    @contextmanager
    def _engine(self, system: System, name: str) -> Iterator[Engine]:
        with ExitStack() as stack:
            with system.side():
                engine = stack.enter_context(
                    started_engine(
                        name, self._site.folder, self._site.partition.engine, self._model, self._load,
                        self._requests_max, system.transfer, packages=system.packages,
                        # With and without a cache, the tokens after the document are computed in a step of their own:
                        # their sums have the same order.
                        step_tokens=self._load.chunks * DEFAULT_CHUNK_TOKENS,
                    )
                )  # fmt: skip
            yield engine

    def _orders(self, document: int, question: int, at: float = 0.0) -> list[dict[str, Any]]:
        tokens = prompt(document, self._load.chunks * DEFAULT_CHUNK_TOKENS, VOCABULARY)
        tokens += prompt(_QUESTIONS + question, TAIL_TOKENS, VOCABULARY)
        return [{"prompt": tokens, "output": self._load.output, "at": at}]

    def _ask(self, engine: Engine, document: int, question: int) -> dict[str, Any]:
        (result,) = engine.call("serve", requests=self._orders(document, question))
        found: dict[str, Any] = result
        return found

    def _awake(self, engine: Engine) -> None:
        """Serve a short prompt that does not count.

        After another engine's turn all of its data comes from memory, as never in operation.
        """
        tokens = prompt(_WARM_UP, TAIL_TOKENS, VOCABULARY)
        engine.call("serve", requests=[{"prompt": tokens, "output": AWAKENING_TOKENS, "at": 0.0}])

    def _documents(self, system: System) -> range:
        """Return the documents of a system's requests: the first half if it is measured briefly."""
        return range((self._load.documents + 1) // 2 if system.brief else self._load.documents)

    def _filled(self, system: System) -> range:
        """Return the documents that a system computes and keeps: more of them for a ratio of one per cent."""
        return range(self._plan.fills) if system.often else self._documents(system)

    # ---- Filling -----------------------------------------------------------------------------------------------------

    def fill(self, results: _Results, progress: Progress) -> None:
        """Compute and keep every document with every system, in turns."""
        near = [system for system in self._systems if system.fills and not system.linked]
        with ExitStack() as stack:
            engines = [(System(often=True), self._plain)]
            for index, system in enumerate(near):
                progress("starting engines")
                engines.append((system, stack.enter_context(self._engine(system, f"filling-{index}"))))
                if system.name == OURS:  # two processes differ by more than storing costs
                    engines.append((replace(system, name=IDLE), engines[-1][1]))
            for system, engine in engines:
                self._ask(engine, _WARM_UP + 1, 0)
                system.stored(engine, self._load.chunks)
            for document in range(self._plan.fills):
                progress("filling")
                for system, engine in engines if document % 2 else reversed(engines):
                    if document not in self._filled(system):
                        continue
                    self._awake(engine)
                    begin = _cpu(engine, system)
                    with _idle(engine) if system.name == IDLE else nullcontext():
                        result = self._ask(engine, document, 0)
                    system.stored(engine, (document + 2) * self._load.chunks)
                    result["cpu_s"] = _cpu(engine, system) - begin
                    self._answers.check(system.name, document, 0, result, 0)
                    results.requests[FILLING, 0.0, system.name].append(result)

    # ---- Measuring ---------------------------------------------------------------------------------------------------

    def measure(self, results: _Results, progress: Progress) -> None:
        """Restart the engines and ask about the documents again: next to the stores, then over links.

        Engines of one end run at a time, because all of them need too much memory.
        """
        for far, rates in ((False, (0.0,)), (True, self._plan.links)):
            systems = [system for system in self._systems if system.linked == far]
            if not systems:
                continue
            with ExitStack() as stack:
                turns = [] if far else [(System(), self._plain)]
                for index, system in enumerate(systems):
                    progress("starting engines")
                    turns.append((system, stack.enter_context(self._engine(system, f"measured-{index}"))))
                for system, engine in turns:  # open connections, and touch memory for the first time
                    system.forget()
                    self._ask(engine, 0, 0)
                for rate in rates:
                    self._at(results, rate, turns, progress)

    def _at(self, results: _Results, rate: float, turns: Sequence[tuple[System, Engine]], progress: Progress) -> None:
        if rate:
            assert isinstance(self._network, Link)
            self._network.limit(rate)
        for number in range(self._plan.repeats):
            progress(f"asking over {rate:g} Gbit/s" if rate else "asking")
            there = [each for each in turns if number == 0 or not each[0].brief]
            for document in range(self._load.documents):
                for system, engine in there if (document + number) % 2 else reversed(there):
                    if document in self._documents(system):
                        self._alone(results, rate, system, engine, document, 1 + number)
        progress("recording")
        self._record(results, rate, turns)
        for number in range(0 if rate else self._plan.rounds):
            there = [each for each in turns if not each[0].brief]
            for system, engine in there if number % 2 else reversed(there):
                progress(f"asking at {self._load.rate:g}/s")
                self._arriving(results, system, engine, number)

    def _cached(self, system: System) -> int:
        return self._load.chunks * DEFAULT_CHUNK_TOKENS if system.transfer else 0

    def _alone(
        self, results: _Results, rate: float, system: System, engine: Engine, document: int, question: int
    ) -> None:
        system.forget()
        self._awake(engine)
        begin = _cpu(engine, system)
        result = self._ask(engine, document, question)
        result["cpu_s"] = _cpu(engine, system) - begin
        self._answers.check(system.name, document, question, result, self._cached(system))
        if system.name == OURS_LAYERS and "retrieval_s" in result:  # it was loaded chunk by chunk
            raise ShadowServeError(f"{system.name} loaded document {document} chunk by chunk: see its log")
        results.requests[ALONE, rate, system.name].append(result)

    def _arriving(self, results: _Results, system: System, engine: Engine, number: int) -> None:
        load = replace(self._load, seed=number)
        question = 1 + self._plan.repeats + number
        times = arrivals(load.requests, load.rate, load.seed)
        orders = [order for document, at in enumerate(times) for order in self._orders(document, question, at)]
        system.forget()
        begin = _cpu(engine, system)
        served = engine.call("serve", requests=orders)
        cost = (_cpu(engine, system) - begin) / len(served)
        seconds = max(result["end_s"] for result in served)
        for document, result in enumerate(served):
            # The requests of a batch depend on their arrival, and the rounding of bfloat16 sums on the batch: later
            # tokens may differ from run to run, in the same system.
            check_cached(system.name, document, result, self._cached(system))
            more = {"cpu_s": cost, "tokens_per_s": load.output * len(served) / seconds}
            results.requests[ARRIVING, 0.0, system.name].append(result | more)

    def _record(self, results: _Results, rate: float, turns: Sequence[tuple[System, Engine]]) -> None:
        """Ask about each document once more, and record how long the data plane fetches."""
        ((system, engine),) = [each for each in turns if each[0].name == OURS]
        found: list[dict[str, Any]] = []

        def ask() -> None:
            found.extend(self._ask(engine, document, 0) for document in range(self._load.documents))

        seconds = 1 + 2 * sum(result["end_s"] for result in results.requests[ALONE, rate, OURS]) / self._plan.repeats
        spans, _ = record(system.data_plane, seconds, _FETCHES_MAX, ask)
        fetching = sum(span.end_ns - span.begin_ns for span in spans if span.step == "fetch") / 1e9
        results.fetching[rate] = fetching / sum(result["retrieval_s"] for result in found)
        if rate:
            received = sum(span.output_bytes for span in spans if span.step == "net")
            results.link_s[rate] = received * 8 / (_TCP_SHARE * rate * 1e9) / len(found)
            results.over_link[rate] = fetching / len(found) / results.link_s[rate]


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
    """Return the CPU time of all processes that serve."""
    return sum(map(cpu_s, [psutil.Process(engine.process.pid), *system.processes]))


# ---- Report ----------------------------------------------------------------------------------------------------------


def _report(results: _Results, absent: dict[str, str], plan: _Plan) -> Report:
    report = Report("serving", COLUMNS, bars=["ttft_ms"])
    for (what, rate, system), requests in results.requests.items():
        row = _row(requests)
        if system == OURS and what == ALONE:
            row["fetch_ms"] = results.fetching[rate] * row["retrieval_ms"]
            row["scatter_ms"] = row["retrieval_ms"] - row["fetch_ms"]
        link = {"link_Gbit_per_s": rate} if rate else {}
        report.row(what=what, **link, system=system, **row)
    for system, reason in absent.items():
        report.row(system=system, note=reason)
    slowest = min(plan.links, default=0.0)
    for name, what, rate, other, goal in (
        ("ttft_over_lmcache", ALONE, 0.0, REDIS, "at most 0.15; LMCache over Redis, defaults"),
        ("ttft_over_lmcache_local", ALONE, 0.0, LOCAL, "at most 0.2; our remote store, its CPU tier"),
        ("ttft_over_lmcache_link", ALONE, slowest, REDIS, f"at most 0.25; at {slowest:g} Gbit/s"),
        ("ttft_over_lmcache_shm", ALONE, 0.0, REDIS_SHM, "none; its strongest mode"),
        ("ttft_over_lmcache_local_shm", ALONE, 0.0, LOCAL_SHM, "none; its strongest mode"),
        ("ttft_over_lmcache_link_shm", ALONE, slowest, REDIS_SHM, "none; its strongest mode"),
        ("ttft_over_recompute", ALONE, 0.0, OFF, "at most 0.06"),
        ("ttft_over_recompute_arriving", ARRIVING, 0.0, OFF, "none; with what waits in between"),
    ):
        if pairs := results.pairs(what, rate, OURS, other):
            report.ratio(name, pairs, goal, results.limits(rate, other) if what == ALONE else ())
    for name, rate, other in (
        ("ttft_layers_over_default", 0.0, OURS),
        ("ttft_layers_over_default_link", slowest, OURS),
        ("ttft_layers_over_lmcache", 0.0, REDIS),
        ("ttft_layers_over_lmcache_shm", 0.0, REDIS_SHM),
        ("ttft_layers_over_lmcache_local_shm", 0.0, LOCAL_SHM),
    ):
        if pairs := results.pairs(ALONE, rate, OURS_LAYERS, other):
            report.ratio(name, pairs, "none; `layer_order`")
    for name, system, other, goal in (
        ("fill_over_off", OURS, IDLE, "at most 1.03; of one engine, storing and not"),
        ("fill_over_plain", OURS, OFF, "none; of two processes"),
        ("fill_over_plain_idle", IDLE, OFF, "none; how far two processes are apart of which neither stores"),
        ("fill_over_plain_lmcache", REDIS, OFF, "none; of two processes, LMCache over Redis"),
        ("fill_over_plain_lmcache_shm", REDIS_SHM, OFF, "none; of two processes, its strongest mode"),
    ):
        if pairs := results.pairs(FILLING, 0.0, system, other, "request_s"):
            report.ratio(name, pairs, goal)
    for rate, over in results.over_link.items():
        report.ratio(f"fetch_over_link_{rate:g}", [over], "none; the link alone takes 1")
    return report


def _row(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of a row's requests."""
    columns = {"ttft_s": "ttft_ms", "tpot_s": "tpot_ms", "request_s": "request_ms", "blocked_s": "blocked_ms"}
    columns |= {f"{step}_s": f"{step}_ms" for step in STEPS}
    row: dict[str, Any] = {}
    for name, column in columns.items():
        if found := [request[name] for request in requests if name in request]:
            row[column] = statistics.median(found) * 1e3
    for name in ("tokens_per_s", "cpu_s"):
        if found := [request[name] for request in requests if name in request]:
            row[name] = statistics.median(found)
    return row

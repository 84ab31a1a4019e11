"""Measures agents: long conversations of many short turns, with ShadowServe, with LMCache and without a cache.

Method: the shape of published agent traces (tens of turns, a growing context of which 95 % was served before, little
output, subagents that continue their parent's context), scaled to a small machine. Agents share a system prompt. Each
turn begins some time after the last one has ended; a subagent's turns come between two turns of its parent. The turns'
texts are recorded, so every system serves the same prompts. All KV together is more than the engine's memory holds, and
vLLM's own prefix cache is on in every system. The engine is restarted in the middle; stores keep running. One engine
runs at a time: each round starts one system after the other, every second round in the opposite order, with prompts of
its own. ShadowServe's engine keeps what it has learned over the restart, as by default. Systems: no cache; ShadowServe
and LMCache's multiprocess server (its strongest mode: shared memory, one more worker) in memory of the engine's host;
ShadowServe without memory there, with a storage node behind a link, and LMCache with its memory there and tuned Redis
behind the link (at the restart the memory is emptied, as if the agents went on at another host). Turns are shorter than
the default chunk of 256 tokens, so both caches have smaller chunks; over 16 turns, both served more tokens per second
with 64.

``tokens_per_s`` is prompt and output tokens over the time of both halves. ``prefill_saved_s`` is the time of steps that
compute prompts, less than without a cache. ``same_first_tokens`` is the share of answers that begin as without a
cache: other batches and other ends of cached prefixes change the rounding of bfloat16 sums, and sometimes a token. With
wrong KV nearly all would differ, so below a half the benchmark fails. The limit of a ratio is a system whose engine
does only what this one's steps did, with loads that take no time.

Prediction: ``tokens_over_off`` 4, ``_link`` 3; ``tokens_over_lmcache`` 1.1, ``_link`` 1.
"""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.fetch import peers_option
from shadowserve_tools.bench.parts.options import benchmark, grouped, listed, one_of, real, repeats_option, whole
from shadowserve_tools.bench.parts.serving import Engine, Host, Load, Model, made_up, p95, shape_options, write_model
from shadowserve_tools.bench.parts.systems import LOCAL_SHM, OFF, REDIS_SHM, System, lmcache
from shadowserve_tools.bench.peers.installed import NOT_INSTALLED, does_not_run, installed
from shadowserve_tools.bench.peers.network import LOOPBACK, Link, Network, linked
from shadowserve_tools.charts import Chart
from shadowserve_tools.processes import Programs, start_redis
from shadowserve_tools.report import Report, over

OURS: Final = "ShadowServe, memory tier"
OURS_LINK: Final = "ShadowServe, storage node"
SYSTEMS: Final = {"off": OFF, "ours": OURS, "lmcache": LOCAL_SHM, "ours_link": OURS_LINK, "lmcache_link": REDIS_SHM}
RATIOS: Final = (
    ("tokens_over_lmcache", "tokens_per_s", OURS, LOCAL_SHM, "at least 1.1; both in this host's memory"),
    ("tokens_over_lmcache_link", "tokens_per_s", OURS_LINK, REDIS_SHM, "none; LMCache has memory on the engine's host"),
    ("tokens_over_off", "tokens_per_s", OURS, OFF, "at least 2"),
    ("tokens_over_off_link", "tokens_per_s", OURS_LINK, OFF, "none"),
    ("tpot_over_lmcache", "tpot_s", OURS, LOCAL_SHM, "at most 1"),
    ("tpot_over_lmcache_link", "tpot_s", OURS_LINK, REDIS_SHM, "none"),
    ("tpot_over_off", "tpot_s", OURS, OFF, "at most 1"),
    ("tpot_over_off_link", "tpot_s", OURS_LINK, OFF, "none"),
    ("ttft_over_lmcache", "ttft_s", OURS, LOCAL_SHM, "none"),
    ("ttft_over_off", "ttft_s", OURS, OFF, "none"),
)
"""Name, figure, two systems and the goal."""
_SPAWNS: Final = (0.25, 0.75)
"""Turns, as shares of a conversation, after which every second agent starts a subagent."""
_SUBAGENT_TURNS: Final = 2
_CHUNK_TOKENS: Final = 64
_CONTEXTS: Final = 2.2
"""Largest contexts that the engine's memory holds."""
_SAME_MIN: Final = 0.5
"""Share of answers that must begin as without a cache. Wrong KV gives another token nearly always."""
_WARM_UP: Final = 1 << 30
_HALF_TIMEOUT_S: Final = 1800.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Conversations of agents; ``turn_tokens`` are the input of a turn."""

    agents: int
    turns: int
    system_tokens: int
    turn_tokens: int
    output_tokens: int
    pause: float

    def requests(self, number: int) -> list[dict[str, Any]]:
        """Return all turns of a round; those of one round share no prompt with another."""
        found: list[dict[str, Any]] = []
        seeds = itertools.count(number << 20)

        def add(context: list[tuple[int, int]], turn: int, after: int | None) -> int:
            """Add a turn, which extends its context by its input and the recorded answer; return its index."""
            context.append((next(seeds), self.turn_tokens))
            found.append(
                {"parts": list(context), "output": self.output_tokens, "at": self.pause, "after": after, "turn": turn}
            )
            context.append((next(seeds), self.output_tokens))
            return len(found) - 1

        system = next(seeds), self.system_tokens
        spawns = [int(share * self.turns) for share in _SPAWNS]
        for agent in range(self.agents):
            context, last = [system], None
            for turn in range(self.turns):
                last = add(context, turn, last)
                own = list(context)
                for _ in range(_SUBAGENT_TURNS if agent % 2 == 0 and turn in spawns else 0):
                    last = add(own, turn, last)
        return found

    @property
    def context_tokens(self) -> int:
        """Tokens of the largest prompt, with its output."""
        each = self.turn_tokens + self.output_tokens
        return self.system_tokens + (self.turns + _SUBAGENT_TURNS) * each


def _halves(requests: Sequence[dict[str, Any]], turns: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the turns before the restart, and those after it, each with its own numbers in ``after``."""
    for late in (False, True):
        indexes = [index for index, each in enumerate(requests) if (each["turn"] >= turns // 2) == late]
        place = {index: number for number, index in enumerate(indexes)}
        yield [requests[index] | {"after": place.get(requests[index]["after"])} for index in indexes]


@dataclass
class _Run:
    """Results of a system in a round, turn by turn."""

    turns: list[dict[str, Any]] = field(default_factory=list)
    wall_s: float = 0.0
    busy_s: float = 0.0
    prefill_s: float = 0.0
    moved: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return float(sum(turn["tokens"] + len(turn["answer"]) for turn in self.turns)) / self.wall_s

    @property
    def tpot_s(self) -> float:
        return statistics.fmean(turn["tpot_s"] for turn in self.turns)

    @property
    def ttft_s(self) -> float:
        return statistics.fmean(turn["ttft_s"] for turn in self.turns)

    def ttft_of(self, turns: Sequence[int]) -> float:
        return statistics.fmean(turn["ttft_s"] for turn in self.turns if turn["turn"] in turns)


@benchmark(
    "system", "tokens_per_s", "ttft_ms", "ttft_early_ms", "ttft_late_ms", "ttft_restart_ms", "tpot_ms", "tpot_p95_ms",
    "computed_tokens", "prefill_saved_s", "fetched_GB", "stored_GB", "same_first_tokens", "note",
    bars=["tokens_per_s", "tpot_ms"],
)  # fmt: skip
@shape_options(8, 512, 16, 128)
@grouped("shape", Shape, {
    "agents": whole("--agents", 4, "Agents.", 2),
    "turns": whole("--turns", 30, "Turns of each agent, without those of its subagents.", 4, 200),
    "system_tokens": whole("--system-tokens", 512, "Tokens of the system prompt, which all agents share."),
    "turn_tokens": whole("--turn-tokens", 160, "Tokens that a turn adds, such as a tool's result."),
    "output_tokens": whole("--output-tokens", 16, "Tokens of an answer.", 2, 128),
    "pause": real("--pause", 0.1, "Seconds from an answer to the next turn.", 0, 60),
})  # fmt: skip
@real("--link link", 4.0, "Rate of the link between engine and stores, in Gbit/s.", 0.1, 100)
@repeats_option(2, "Rounds: each system serves once in each.")
@listed("--systems", ",".join(SYSTEMS), "Systems to measure.", one_of(SYSTEMS))
@peers_option
def agents(
    report: Report, programs: Programs, model: Model, shape: Shape, link: float, repeats: int,
    systems: list[str], peers_python: Path,
) -> None:  # fmt: skip
    """Serve long conversations of agents with ShadowServe, with LMCache and without a cache."""
    bench = _Bench(programs, model, shape, peers_python)
    bench.prepare(link if any(name.endswith("_link") for name in systems) else 0.0)
    progress = programs.progress(repeats * len(systems))
    for number in range(repeats):
        for name in systems if number % 2 == 0 else reversed(systems):
            progress(f"round {number + 1}: {SYSTEMS[name]}")
            bench.run(SYSTEMS[name], number)
    _report(report, bench, shape)


class _Bench:
    """Runs of all systems, one engine at a time.

    Attributes:
        runs: Runs of each system, round after round.
        absent: Why a system does not run.
    """

    def __init__(self, programs: Programs, model: Model, shape: Shape, peers_python: Path) -> None:
        self._programs, self._model, self._shape, self._python = programs, model, shape, peers_python
        self._load = Load.of_prompt(shape.context_tokens, output=shape.output_tokens, running_max=shape.agents)
        self._network: Network = LOOPBACK
        self.runs: defaultdict[str, list[_Run]] = defaultdict(list)
        self.absent: dict[str, str] = {}

    def prepare(self, link: float) -> None:
        """Write the model, and make a link of this rate; 0: none."""
        write_model(self._programs.logs, self._model, self._load)
        if not link:
            return
        try:
            network = self._programs.enter_context(linked())
        except ShadowServeError as error:
            self.absent |= dict.fromkeys((OURS_LINK, REDIS_SHM), str(error))
        else:
            network.limit(link)
            self._network = network

    @property
    def _kv_bytes(self) -> int:
        """Bytes of all KV of a round."""
        return self._model.kv_bytes * self._shape.context_tokens * (self._shape.agents + 2)

    def run(self, name: str, number: int) -> None:
        """Serve a round with one system, and stop it."""
        if name in self.absent:
            return
        if name in (LOCAL_SHM, REDIS_SHM) and "lmcache" not in installed(self._python):
            self.absent[name] = NOT_INSTALLED
            return
        folder = self._programs.logs / f"{len(self.runs[name])}-{list(SYSTEMS.values()).index(name)}"
        folder.mkdir()
        (folder / "model").symlink_to(self._programs.logs / "model")
        with ExitStack() as stack:
            far = name in (OURS_LINK, REDIS_SHM)
            host = Host(stack, folder, self._model, self._load, self._network if far else LOOPBACK)
            try:
                system = self._start(name, host)
            except (ShadowServeError, OSError) as error:
                self.absent[name] = does_not_run(error)
                return
            self.runs[name].append(self._serve(system, host, number))

    def _start(self, name: str, host: Host) -> System:
        """Start the programs of a system other than its engine."""
        side = host.network.client_side
        if name == OURS:
            room = json.dumps({"memory_budget_bytes": self._kv_bytes + (64 << 20)})
            plane = host.start_plane("", "--tiers", room, side=side)
        elif name == OURS_LINK:
            plane = host.start_plane(host.start_storage().address, side=side)
        elif name != OFF:
            redis = None
            if name == REDIS_SHM:
                with host.network.store_side():
                    redis = host.stack.enter_context(start_redis(host.folder, host=host.network.host, tuned=True))
            size, behind = self._kv_bytes, redis is not None
            return lmcache(host, self._python, size, name, True, redis, behind, side, _CHUNK_TOKENS)
        else:
            return System(side=side)
        return System(
            name=name,
            linked=name == OURS_LINK,
            side=side,
            transfer=host.plugin(
                plane,
                layer_order="auto",
                computing_cache=str(host.folder / "computing.json"),
                chunk_tokens=_CHUNK_TOKENS,
            ),
            processes=[psutil.Process(plane.process.pid)],
            stored=lambda engine, _chunks: engine.call("settle"),
        )

    def _serve(self, system: System, host: Host, number: int) -> _Run:
        run, sent = _Run(), self._sent()
        options = {
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": int(_CONTEXTS * self._shape.context_tokens) * self._model.kv_bytes,
        }
        for half, turns in enumerate(_halves(self._shape.requests(number), self._shape.turns)):
            with ExitStack() as stack, system.side():
                engine = host.start_engine(
                    f"engine-{half}", system.transfer, stack, packages=system.packages, **options
                )
                engine.ask(made_up(DEFAULT_CHUNK_TOKENS, _WARM_UP), self._shape.output_tokens)
                self._converse(run, engine, turns, restarted=half == 1)
                system.stored(engine, 0)
                if system.name in (OURS, OURS_LINK):
                    _count(run, engine)
            system.forget()
        if system.linked:
            run.moved["fetched_bytes"] = self._sent() - sent
        return run

    def _sent(self) -> float:
        """Return the bytes that the link has carried to the engines so far."""
        return float(sum(self._network.sent_bytes())) if isinstance(self._network, Link) else 0.0

    @staticmethod
    def _converse(run: _Run, engine: Engine, turns: Sequence[dict[str, Any]], *, restarted: bool) -> None:
        results = engine.call("converse", _HALF_TIMEOUT_S, turns=turns)
        steps = engine.call("pressure")["steps"]
        run.wall_s += max(result["end_s"] for result in results)
        run.busy_s += sum(seconds for seconds, *_ in steps)
        run.prefill_s += sum(seconds for seconds, requests, tokens, _ in steps if tokens > requests)
        for turn, result in zip(turns, results, strict=True):
            first = restarted and turn["after"] is None
            run.turns.append(result | {"turn": turn["turn"], "restarted": first})


def _count(run: _Run, engine: Engine) -> None:
    engine.ask(made_up(2, _WARM_UP + 1), 2)  # counters are updated with a step
    for name, count in engine.call("counters").items():
        if name in ("fetched_bytes", "stored_bytes"):
            run.moved[name] = run.moved.get(name, 0.0) + count


def _report(report: Report, bench: _Bench, shape: Shape) -> None:
    off = bench.runs.get(OFF, [])
    for name, runs in bench.runs.items():
        report.row(system=name, **_row(runs, shape), **(_compared(runs, off) if off and name != OFF else {}))
    for name, reason in bench.absent.items():
        report.row(system=name, note=reason)
    for ratio, figure, own, other, goal in RATIOS:
        both = [bench.runs.get(name, []) for name in (own, other)]
        if all(both):
            limits = [theirs.wall_s / mine.busy_s for mine, theirs in zip(*both, strict=True)]
            values = ([getattr(run, figure) for run in runs] for runs in both)
            report.ratio(ratio, over(*values), goal, limits if figure == "tokens_per_s" else ())
    series = {
        name: [(turn, 1e3 * statistics.fmean(run.ttft_of([turn]) for run in runs)) for turn in range(shape.turns)]
        for name, runs in bench.runs.items()
    }
    report.charts.append(Chart("First tokens; the engine restarts in the middle", x="turn", y="ms", series=series))


def _row(runs: Sequence[_Run], shape: Shape) -> dict[str, Any]:
    third, turns = shape.turns // 3, [turn for run in runs for turn in run.turns]
    figures = {
        "tokens_per_s": [run.tokens_per_s for run in runs],
        "ttft_ms": [1e3 * run.ttft_s for run in runs],
        "ttft_early_ms": [1e3 * run.ttft_of(range(third)) for run in runs],
        "ttft_late_ms": [1e3 * run.ttft_of(range(shape.turns - third, shape.turns)) for run in runs],
        "ttft_restart_ms": [1e3 * turn["ttft_s"] for turn in turns if turn["restarted"]],
        "tpot_ms": [1e3 * run.tpot_s for run in runs],
        "computed_tokens": [sum(turn["tokens"] - turn["cached"] for turn in run.turns) for run in runs],
        "fetched_GB": [run.moved["fetched_bytes"] / 1e9 for run in runs if "fetched_bytes" in run.moved],
        "stored_GB": [run.moved["stored_bytes"] / 1e9 for run in runs if "stored_bytes" in run.moved],
    }
    return {name: statistics.fmean(values) for name, values in figures.items() if values} | {
        "tpot_p95_ms": 1e3 * p95([turn["tpot_s"] for turn in turns])
    }


def _compared(runs: Sequence[_Run], off: Sequence[_Run]) -> dict[str, Any]:
    """Return the saved seconds of prefill, and the share of answers that begin as without a cache."""
    pairs = list(zip(off, runs, strict=True))
    same = [
        mine["answer"][0] == its["answer"][0]
        for one, other in pairs
        for mine, its in zip(one.turns, other.turns, strict=True)
    ]
    if statistics.fmean(same) < _SAME_MIN:
        raise ShadowServeError(f"{sum(same)} of {len(same)} answers begin as without a cache: its KV is wrong")
    saved = [one.prefill_s - other.prefill_s for one, other in pairs]
    return {"prefill_saved_s": statistics.fmean(saved), "same_first_tokens": statistics.fmean(same)}

"""The cells of the matrix: operations on an engine with the plugin, compared with the engine without it."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from answers import LOGPROBS, TOLERANCES, Answer, answer, answers, difference, of_output, prefill_of
from machine import WAIT_MAX_S, wait_for
from redis import Redis
from stack import Process, data_plane
from tiny_models import random_tokens, with_another_first_chunk

MANY_CHUNKS: Final = 130
"""Number of chunks: more than 128, because other systems failed there."""
SEEDS: Final = 4
_SIX_CHUNKS: Final = (
    *("local then stored", "abort", "a record is lost", "the data plane is killed", "a record is damaged"),
)


@dataclass(frozen=True)
class Plan:
    """The prompts of a family: by cell, each run alone, and those of a crowd, run at once.

    Attributes:
        chunk: Number of tokens in a chunk.
        crowd_tokens: Number of generated tokens for each prompt of the crowd.
        step: Number of tokens in a step, for prompts that are computed in steps.
    """

    chunk: int
    alone: dict[str, list[int]]
    crowd: list[list[int]]
    crowd_tokens: int
    step: int


def plan(chunk: int, window: int, tokens_max: int, cells: tuple[str, ...]) -> Plan:
    """Return the prompts for a chunk size and a window size in tokens, none longer than ``tokens_max``."""
    rest = chunk // 4 + 1
    chunks = dict.fromkeys(_SIX_CHUNKS, 6) | dict.fromkeys(("whole prefill", "chunked prefill", "another TP size"), 5)
    chunks |= {"one chunk": 1, "128 chunks": min(MANY_CHUNKS, (tokens_max - 64) // chunk)}
    lengths = {cell: count * chunk + rest for cell, count in chunks.items()}
    # A hit is whole chunks, or one token less at the end of the prompt: it ends at the last token but one.
    for sign, more in ((" - 1", -1), ("", 0), (" + 1", 1)) if window else ():
        lengths[f"window{sign}"] = window + more + 1
    alone = {cell: random_tokens(length, cell) for cell, length in lengths.items() if cell in cells}
    crowd = [random_tokens(2 * chunk + rest, f"crowd {seed}") for seed in range(SEEDS)] if "preemption" in cells else []
    return Plan(chunk, alone, crowd, max(96, chunk + chunk // 4), chunk + chunk // 2)


_FAULTS: Final = ("a record is lost", "the data plane is killed", "a record is damaged")
CELLS: Final = (
    *("sensitive", "one chunk", "window - 1", "window", "window + 1", "128 chunks", "local then stored"),
    *("whole prefill", "chunked prefill", "preemption", "abort", *_FAULTS, "another TP size"),
)
_GOES_ON_BEHIND: Final = (20, 35, 50, 65, 80)
"""Generated tokens: they give a request many positions for a preemption."""
_FEWER_BLOCKS: Final = (2.6, 2.2, 1.8, 1.5, 1.25, 1.1)
"""Shares of the memory of one request: the first share that causes preemptions is used."""


_FOUND_AGAIN_S: Final = 10 * WAIT_MAX_S
"""Bound of a request without a fault: the deadlines of a lookup, a fetch and a store together."""


@dataclass
class Cell:
    """Result of a cell.

    Attributes:
        outcome: Outcome: ``passed``, ``failed``, or ``not possible`` here.
        hit: Number of tokens that were not computed.
        own: Number of tokens in vLLM's own prefix cache: a hit should reach it in whole chunks.
        difference: Largest difference of logprobs; in *sensitive*, the smallest.
    """

    outcome: str = "passed"
    why: str = ""
    hit: int | None = None
    own: int | None = None
    difference: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the cell without meaningless values: logprobs of other tokens mean nothing."""
        gap = float(f"{self.difference:.2g}") if math.isfinite(self.difference) else 0
        found = asdict(self) | {"difference": gap or None}
        return {name: value for name, value in found.items() if value not in (None, "")}


@dataclass
class Reference:
    """Answers of the engine without the plugin.

    Attributes:
        tolerance: Tolerance of logprobs; see answers.py.
        alone: Answers by cell.
        own: Second answers of the same engine by cell, from its own prefix cache.
        crowd: Answers to the crowd's prompts, each computed alone.
        unsound: Cells in which vLLM itself answers differently without the plugin, with the reason.
        rounding: Difference of vLLM's own answer when it continues behind generated tokens, as after a preemption.
    """

    plan: Plan
    tolerance: float
    alone: dict[str, Answer] = field(default_factory=dict)
    own: dict[str, Answer] = field(default_factory=dict)
    crowd: list[Answer] = field(default_factory=list)
    sensitive: Cell = field(default_factory=Cell)
    unsound: dict[str, str] = field(default_factory=dict)
    rounding: str = ""

    def compare(self, cell: str, expected: Answer, given: Answer, where: str) -> None:
        """Record that vLLM's own answer depends on more than the prompt."""
        if difference(expected, given, self.tolerance) > self.tolerance:
            self.unsound.setdefault(cell, f"vLLM answers otherwise {where}, without the plugin as well")


def refer(engine: Any, plan: Plan, tolerance: float) -> Reference:
    """Get the answers of the engine without the plugin, and check that they distinguish prefixes."""
    found = Reference(plan, tolerance)
    least = math.inf
    for cell, prompt in plan.alone.items():
        with prefill_of(engine, plan.step if cell == "chunked prefill" else None):
            engine.forget()
            found.alone[cell] = answer(engine, prompt)
            found.own[cell] = answer(engine, prompt)
            found.compare(cell, found.alone[cell], found.own[cell], "from its own prefix cache")
            if cell == "local then stored":
                engine.forget()
                answer(engine, prompt[: 2 * plan.chunk + 1])
                found.compare(cell, found.alone[cell], answer(engine, prompt), "from its own prefix cache")
            for other in _others(prompt, plan.chunk):
                engine.forget()
                least = min(least, difference(found.alone[cell], answer(engine, other), 0.0))
    for prompt in plan.crowd:
        engine.forget()
        found.crowd.append(answer(engine, prompt, plan.crowd_tokens))
        found.rounding = found.rounding or _rounding(engine, prompt, found.crowd[-1], tolerance)
    for given in (each for crowd in pressed(engine, plan) for each in zip(found.crowd, crowd, strict=True)):
        found.compare("preemption", *given, "where requests drive each other out")
    engine.forget()
    found.sensitive.difference = least
    if least < 2 * tolerance:
        why = f"another chunk moves logprobs by {least:.2g} only, where {tolerance} is let pass"
        found.sensitive = Cell("failed", why, difference=least)
    return found


def _others(prompt: list[int], chunk: int) -> Iterator[list[int]]:
    """Yield the prompt with another first chunk, and with another last chunk that a hit can serve."""
    if len(prompt) > chunk:
        last = (len(prompt) - 1) // chunk * chunk
        yield with_another_first_chunk(prompt, chunk)
        yield prompt[: last - chunk] + random_tokens(chunk, "another last chunk") + prompt[last:]


def _rounding(engine: Any, prompt: list[int], alone: Answer, tolerance: float) -> str:
    """Return the difference between vLLM's answers if it computes decoded tokens as a prompt; empty if it is small."""
    for generated in _GOES_ON_BEHIND if tolerance > TOLERANCES["float32"] else ():
        engine.forget()
        rest = Answer(alone.tokens[generated:], alone.logprobs[generated:], 0)
        again = answer(engine, prompt + alone.tokens[:generated], len(rest.tokens))
        if (found := difference(rest, again, tolerance)) > tolerance:
            how = f"logprobs {found:.2g} apart" if math.isfinite(found) else "other tokens"
            return (
                f"without the plugin a prompt of which {generated} generated tokens are computed again is answered with"
                f" {how}: what preempted requests leave in the store is compared, and not what they are answered"
            )
    return ""


def pressed(engine: Any, plan: Plan) -> Iterator[list[Answer]]:
    """Run the crowd twice with few blocks, so that vLLM preempts requests; yield nothing if it cannot preempt."""
    if not plan.crowd:
        return
    pool = engine.scheduler.kv_cache_manager.block_pool
    engine.forget()
    free = fewest = engine.free_blocks()
    for _ in steps_of(engine, plan.crowd[0], plan.crowd_tokens):
        fewest = min(fewest, engine.free_blocks())
    peak, before = free - fewest, _preemptions(engine)
    for share in _FEWER_BLOCKS:
        engine.forget()
        taken = pool.get_new_blocks(max(pool.get_num_free_blocks() - max(int(share * peak), peak + 1), 0))
        try:
            first = answers(engine, plan.crowd, plan.crowd_tokens)
            if _preemptions(engine) > before:
                yield first
                yield answers(engine, plan.crowd, plan.crowd_tokens)  # the first run has stored the hits of this one
                return
        finally:
            pool.free_blocks(taken)


def _preemptions(engine: Any) -> int:
    return sum(int(each.value) for each in engine.llm.get_metrics() if each.name == "vllm:num_preemptions")


def steps_of(engine: Any, prompt: list[int], tokens: int) -> Iterator[list[Any]]:
    """Answer a prompt with the request id ``asked`` step by step; yield finished requests."""
    from vllm import SamplingParams

    core = engine.llm.llm_engine
    options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": LOGPROBS}
    core.add_request("asked", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=tokens, **options))
    ends = time.monotonic() + 5 * WAIT_MAX_S
    while core.has_unfinished_requests():
        yield [output for output in core.step() if output.finished]
        assert time.monotonic() < ends, "a request does not end"


class Stack:
    """A data plane over a storage server, or over a Redis (empty without one), which also stores damaged records."""

    def __init__(self, storage: str, redis: str = "") -> None:
        self.storage, self.redis, self._over = storage, redis, storage
        self.plane = data_plane(storage)

    def over(self, store: str) -> None:
        """Restart the data plane at the same address over another store."""
        self.plane.kill()
        self._over = store
        self.plane = data_plane(store, self.plane.address)

    def restore(self) -> None:
        """Restart it over the storage server, unless it already uses it."""
        if self._over != self.storage or self.plane.killed:
            self.over(self.storage)

    def client(self) -> Redis:
        host, _, port = self._over.rpartition(":")
        return Redis(host, int(port))

    def records(self) -> set[bytes]:
        with self.client() as client:
            return set(client.scan_iter())


class Served:
    """An engine with the plugin, the stack that it stores in, and the answers of the engine without the plugin."""

    def __init__(self, engine: Any, reference: Reference, stack: Stack) -> None:
        self.engine, self.reference, self.stack = engine, reference, stack
        self.plan = reference.plan
        self.problem: str = engine.problem

    def run(self, cell: str) -> Cell:
        """Return the result of one cell. An exception is a failure of the cell."""
        steps: dict[str, Callable[[str], Cell]] = {
            "128 chunks": self._many,
            "local then stored": self._local_then_stored,
            "preemption": self._preemption,
            "abort": self._abort,
            "a record is lost": self._record_lost,
            "the data plane is killed": self._data_plane_killed,
            "a record is damaged": self._record_damaged,
        }
        try:
            if cell.startswith("window") and cell not in self.plan.alone:
                return Cell("not possible", "no layer has a window")
            if cell in _FAULTS and self.problem:
                return Cell("not possible", "nothing is loaded")
            if cell == "chunked prefill" and not self.engine.scheduler.scheduler_config.enable_chunked_prefill:
                return Cell("not possible", "vLLM computes these prompts whole")
            found = steps.get(cell, self._hit)(cell)
            if found.outcome == "failed" and cell in self.reference.unsound:
                return Cell("not possible", self.reference.unsound[cell])
            return found
        except Exception as error:
            return Cell("failed", repr(error)[:500])

    # ------------------------------------------------------------------ hits

    def stored(self, cell: str) -> Cell:
        """Compute and store a cell's prompt, and clear the engine's prefix cache."""
        self.engine.forget()
        found = self._judged(Cell(), answer(self.engine, self.plan.alone[cell]), self.reference.alone[cell])
        self.engine.flush()
        self.engine.forget()
        return found

    def _judged(self, cell: Cell, given: Answer, expected: Answer) -> Cell:
        cell.difference = max(cell.difference, difference(expected, given, self.reference.tolerance))
        if cell.difference > self.reference.tolerance and cell.outcome == "passed":
            cell.outcome = "failed"
            cell.why = f"answered {given.tokens}, without the plugin {expected.tokens}, logprobs {cell.difference:.2g}"
        return cell

    def again(self, name: str, cell: Cell, *, hits: bool = True) -> Cell:
        """Run a cell's prompt again. With ``hits`` and the plugin on, the hit must be as long as in vLLM's cache."""
        given = answer(self.engine, self.plan.alone[name])
        self._judged(cell, given, self.reference.alone[name])
        cell.hit, cell.own = given.cached, self.reference.own[name].cached
        wanted = cell.own // self.plan.chunk * self.plan.chunk
        if hits and not self.problem and cell.hit < wanted and cell.outcome == "passed":
            cell.outcome, cell.why = "failed", f"{cell.hit} tokens were served, of {wanted}"
        if self.problem and cell.hit and cell.outcome == "passed":
            cell.outcome, cell.why = "failed", f"{cell.hit} tokens were served by a plugin that is off"
        return cell

    def _hit(self, cell: str) -> Cell:
        with prefill_of(self.engine, self.plan.step if cell == "chunked prefill" else None):
            return self.again(cell, self.stored(cell))

    def _many(self, cell: str) -> Cell:
        """More chunks than the buffer of waiting stores holds in one step: the second run stores the others."""
        found = self.stored(cell)
        return self.again(cell, self.stored(cell) if found.outcome == "passed" else found)

    def _local_then_stored(self, cell: str) -> Cell:
        found = self.stored(cell)
        answer(self.engine, self.plan.alone[cell][: 2 * self.plan.chunk + 1])
        if not self.problem:
            return self.again(cell, found)
        given = answer(self.engine, self.plan.alone[cell])  # a hit on its own blocks is still served
        return self._judged(found, given, self.reference.alone[cell])

    # ------------------------------------------------------------------ small memory, requests that end early

    def _preemption(self, _: str) -> Cell:
        found, rounds = Cell(), 0
        for given in pressed(self.engine, self.plan):
            rounds += 1
            for one, expected in zip(given, self.reference.crowd, strict=True):
                self._judged(found, one, expected)
            self.engine.flush()
        if not rounds:
            return Cell("failed", "no request was preempted")
        if found.outcome == "failed" and self.reference.rounding:
            found = Cell(why=self.reference.rounding)
        for prompt, expected in zip(self.plan.crowd, self.reference.crowd, strict=True):
            self.engine.forget()
            given = answer(self.engine, prompt, self.plan.crowd_tokens)
            self._judged(found, given, expected)
            if not given.cached and not self.problem and found.outcome == "passed":
                found = Cell("failed", "nothing is served of what preempted requests have stored")
        return found

    def _abort(self, cell: str) -> Cell:
        found = self.stored(cell)
        free = self.engine.free_blocks()
        core = self.engine.llm.llm_engine
        with (
            prefill_of(self.engine, self.plan.step),
            self._while_it_loads(lambda: self.stack.plane.freeze(frozen=True)) as loads,
        ):
            steps = steps_of(self.engine, self.plan.alone[cell], 64)
            while not (loads or (self.problem and self._computed())):
                next(steps)
            core.abort_request(["asked"])
            if loads:
                self.stack.plane.freeze(frozen=False)
            ends = time.monotonic() + WAIT_MAX_S
            while self.engine.scheduler.requests:
                core.engine_core.engine_core.step()
                assert time.monotonic() < ends, "an aborted request does not end"
        self.engine.forget()
        if self.engine.free_blocks() != free:
            return Cell("failed", f"{self.engine.free_blocks()} blocks are free, {free} were before")
        return self.again(cell, found)

    def _computed(self) -> bool:
        return any(request.num_computed_tokens for request in self.engine.scheduler.requests.values())

    # ------------------------------------------------------------------ loads that fail half-way

    @contextmanager
    def _while_it_loads(self, fault: Callable[[], None]) -> Iterator[list[int]]:
        """Cause a fault after the decision to load and before the load; yield the tokens of such loads."""
        connector, loads = self.engine.connector, list[int]()
        allocated = connector.update_state_after_alloc

        def note(request: Any, blocks: Any, tokens: int) -> None:
            if tokens and not loads:
                fault()
                loads.append(tokens)
            allocated(request, blocks, tokens)

        connector.update_state_after_alloc = note
        try:
            yield loads
        finally:
            del connector.update_state_after_alloc
            self.stack.plane.freeze(frozen=False)

    def _faults(self, name: str, fault: Callable[[Redis, list[bytes]], object]) -> Cell:
        """Damage a third of a prompt's records, then the others: answers stay right.

        A hit does not need all of them: of windows, it needs only those at its end.
        """
        before, failed = self.stack.records(), self._failed_loads()
        found = self.stored(name)
        for third in range(3):

            def happen(third: int = third) -> None:
                with self.stack.client() as client:
                    fault(client, sorted(self.stack.records() - before)[third::3])

            with self._while_it_loads(happen) as loads:
                self.again(name, found, hits=False)
            if not loads:
                return Cell("failed", "nothing was loaded")
            self.engine.flush()
            self.engine.forget()
        found.hit = found.own = None  # meaningless for the remaining records
        return found if self._failed_loads() > failed else Cell("failed", "no load failed")

    def _failed_loads(self) -> int:
        counts = self.engine.counters().items()
        return sum(count for name, count in counts if name.startswith("load_failures"))

    def _record_lost(self, cell: str) -> Cell:
        return self._faults(cell, lambda client, names: client.delete(*names))

    def _record_damaged(self, cell: str) -> Cell:
        if not self.stack.redis:
            return Cell("not possible", "no redis-server, and a storage server of ours takes no damaged record")

        def damage(client: Redis, names: list[bytes]) -> None:
            """Flip a bit of every other record, and replace the rest by a sound record of another chunk or group."""
            records = [client.get(name) for name in names]
            for number, (name, record) in enumerate(zip(names, records, strict=True)):
                place = len(record) * (number // 2 % 3 + 1) // 4
                flipped = record[:place] + bytes([record[place] ^ 0x10]) + record[place + 1 :]
                client.set(name, records[number - 1] if number % 2 else flipped)

        self.stack.over(self.stack.redis)
        self._until_found(cell)
        return self._faults(cell, damage)

    def _until_found(self, cell: str) -> None:
        """Wait until the engine reaches a data plane that was down."""
        prompt = random_tokens(2 * self.plan.chunk + 1, f"{cell}: is it back?")

        def found() -> bool:
            self.engine.forget()
            served = answer(self.engine, prompt).cached
            self.engine.flush()
            return served > 0

        if not self.problem:
            wait_for(found, _FOUND_AGAIN_S)
        self.engine.forget()

    def _data_plane_killed(self, cell: str) -> Cell:
        found = self.stored(cell)
        plane: Process = self.stack.plane
        before = self._failed_loads()
        with self._while_it_loads(lambda: plane.freeze(frozen=True)) as loads:
            finished: list[Any] = []
            for outputs in steps_of(self.engine, self.plan.alone[cell], 8):
                finished += outputs
                if loads and not plane.killed:
                    plane.kill()
        self._judged(found, of_output(finished[0]), self.reference.alone[cell])
        self.stack.over(self.stack.storage)
        self._until_found(cell)
        return found if loads and self._failed_loads() > before else Cell("failed", "no load failed")

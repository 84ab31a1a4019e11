"""One engine with all events at once: arrivals, aborts, preemptions, resets, and a data plane with faults.

Requirements: each answer is equal to the answer of an engine without the plugin; each request ends in time; after the
end of all requests, neither the engine's blocks nor the plugin's data about requests are left.

    .venv/bin/python tests/e2e/engine_stress.py pages --seconds 60 --seed 1

runs one of :data:`KINDS` for this time, with a new seed for each run; ``make soak`` runs all of them.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS.parent), str(_TESTS), *(str(_TESTS / name) for name in ("host", "models"))]

from machine import WAIT_MAX_S, free_port, wait_for  # noqa: E402
from scripted import ScriptedDataPlane  # noqa: E402
from tiny_models import random_tokens, write_model  # noqa: E402

from host_control.streams import NEXT_STEP, OTHER_REQUESTS  # noqa: E402
from shadowserve.proto import dataplane_pb2 as pb  # noqa: E402

GENERATED: Final = 110
"""Tokens of the longest answers."""
_REQUESTS: Final = 50
"""Number of requests for one seed."""
_DEADLINES: Final = {
    "fetch_timeout_s": 2.0,
    "lookup_timeout_s": 1.0,
    "store_timeout_s": 2.0,
    "connect_timeout_s": 2.0,
}
"""Short deadlines, because many of them expire."""
_ENGINE: Final[dict[str, Any]] = {
    "max_num_batched_tokens": 160,
    # Blocks of 32 tokens: the longest request fits, and two of most other requests.
    "num_gpu_blocks_override": 36,
    "max_model_len": 1120,
}
_REQUESTS_MAX: Final = 7
_GARBAGE: Final = 77.0


def prompts() -> list[list[int]]:
    """Return prompts, of which some share a prefix, with and without tails after their chunks."""
    made = [random_tokens(length, seed) for seed in range(2) for length in (256, 300, 513, 610, 780)]
    return made + [random_tokens(length, seed) for seed in range(2, 5) for length in (40, 210)]


class Faults:
    """Faults outside of the engine; this class has none."""

    def turn(self, chance: random.Random) -> None:
        """Create a fault or remedy it, at random."""

    def calm(self) -> None:
        """Remedy everything."""


class Script(Faults):
    """A scripted data plane that fails in every way, each for a few steps."""

    def __init__(self, plane: Any) -> None:
        self._plane = plane

    def turn(self, chance: random.Random) -> None:
        if chance.random() > 0.1:
            return
        self.calm()
        script = self._plane.script
        kind = chance.choice(["nothing", "late", "short", "layer", "full", "refused", "away", "stalled", "forgets"])
        if kind == "late":
            script.fetch_delay, script.layer_delay = chance.choice([(0.05, 0.01), (0.5, 0.1), (5.0, 1.0)])
        elif kind in ("short", "layer"):
            script.fail_fetch_at, script.fail_layer = chance.randrange(3), chance.randrange(4)
        elif kind == "full":
            script.batch_chunks, script.batch_layers = 1, chance.choice([1, 3])
        elif kind == "refused":
            script.store_outcome = pb.OUTCOME_STORAGE_REFUSED
        elif kind == "away":
            method = chance.choice(["Fetch", "Store", "Lookup", "RegisterMemory"])
            script.abort[method] = grpc.StatusCode.UNAVAILABLE
        elif kind == "stalled":
            script.stall.add(chance.choice(["Fetch", "Store", "Lookup"]))
            script.write_after_stall = True
        elif kind == "forgets":
            if chance.random() < 0.5:
                self._plane.forget_hosts()
            for key in chance.sample(sorted(self._plane.records), len(self._plane.records) // 2):
                self._plane.records.pop(key, None)

    def calm(self) -> None:
        self._plane.script.unstall.set()
        self._plane.script = type(self._plane.script)()


@dataclass
class _Sent:
    prompt: int
    right: list[int]
    since: float = field(default_factory=time.monotonic)
    answer: list[int] = field(default_factory=list)


class Stress:
    """Drives an engine; ``expected`` has the outputs of an engine without the plugin, by prompt.

    With ``priorities`` requests have different ones. With ``streams`` several requests arrive at once, and their loads
    join each other's steps at random.
    """

    def __init__(
        self,
        engine: Any,
        expected: Sequence[tuple[list[int], list[int]]],
        faults: Faults,
        seed: int,
        *,
        priorities: bool = False,
        streams: bool = False,
    ) -> None:
        self._engine = engine
        self._at_once = 4 if streams else 1
        if streams:
            ways, rule = ["", "", "", NEXT_STEP, OTHER_REQUESTS], engine.connector._scheduler._policy_runner._streams
            rule.why_not = lambda *given, **named: self._chance.choice(ways)
        self._core = engine.llm.llm_engine
        self._expected = expected
        self._faults = faults
        self._chance = random.Random(seed)
        self._priorities = priorities
        self._seed = seed
        self._sent: dict[str, _Sent] = {}
        self._aborted: list[str] = []
        self._numbers = 0
        self.longest_s = 0.0
        # To detect a run without events.
        self.counts: dict[str, int] = dict.fromkeys(("answers", "aborts", "resent", "resets", "preemptions"), 0)

    def run(self, requests: int) -> None:
        """Send the given number of requests; check that all end with the right answer, and that nothing is left."""
        with self._preemptions():
            sent = 0
            while sent < requests:
                for _ in range(self._at_once if self._chance.random() < 0.5 else 0):
                    if len(self._sent) < _REQUESTS_MAX:
                        self._send()
                        sent += 1
                self._something()
                self._faults.turn(self._chance)
                self._step()
            self._faults.calm()
            while self._sent:
                self._step()
        self._assert_idle()

    @contextmanager
    def _preemptions(self) -> Iterator[None]:
        scheduler = self._engine.scheduler
        schedule = scheduler.schedule

        def scheduled(*arguments: Any) -> Any:
            output = schedule(*arguments)
            self.counts["preemptions"] += len(output.preempted_req_ids or ())
            return output

        scheduler.schedule = scheduled
        try:
            yield
        finally:
            scheduler.schedule = schedule

    def _send(self) -> None:
        from vllm import SamplingParams

        chance = self._chance
        if self._aborted and chance.random() < 0.5:  # like a client that lost its connection
            name = self._aborted.pop()
            self.counts["resent"] += 1
        else:
            self._numbers += 1
            name = f"r{self._numbers}"
        number = chance.randrange(len(self._expected))
        prompt, whole = self._expected[number]
        sent = _Sent(number, whole[: chance.choice([1, 8, 40, GENERATED, GENERATED])])
        sampling = SamplingParams(temperature=0.0, max_tokens=len(sent.right), ignore_eos=True, detokenize=False)
        priority = chance.randrange(3) if self._priorities else 0
        self._core.add_request(name, {"prompt_token_ids": prompt}, sampling, priority=priority)
        self._sent[name] = sent

    def _something(self) -> None:
        luck = self._chance.random()
        if luck < 0.04 and self._sent:
            name = self._chance.choice(list(self._sent))
            self._core.abort_request([name])
            self._gone(name)
        elif luck < 0.08 and self._sent:  # the engine receives it after its next step
            name = self._chance.choice(list(self._sent))
            inner = [each for each in self._engine.scheduler.requests if each.partition("-")[0] == name]
            self._core.engine_core.engine_core.aborts_queue.put_nowait(inner)
            self._core.output_processor.abort_requests([name], internal=False)
            self._gone(name)
        elif luck < 0.1:
            # vLLM refuses if a request that does not run holds blocks: it loads, or has loaded.
            holds = self._engine.connector._scheduler._loads or self._engine.scheduler.kv_holding_waiting
            preempts = not holds and self._chance.random() < 0.5
            renames = self._chance.random() < 0.1
            self._engine.llm.reset_prefix_cache(reset_running_requests=preempts, reset_connector=renames)
            self.counts["resets"] += 1
        elif luck < 0.3:
            self._spoil()

    def _gone(self, name: str) -> None:
        del self._sent[name]
        self._aborted.append(name)
        self.counts["aborts"] += 1

    def _spoil(self) -> None:
        """Overwrite free blocks. They may still contain the right KV, which would hide a missing load."""
        parts = self._engine.worker._shards.parts.get(0, ())
        if len(parts) != 1 or not hasattr(parts[0].layout, "_mover"):
            return
        queue = self._engine.scheduler.kv_cache_manager.block_pool.free_block_queue
        free = [block.block_id for block in queue.get_all_free_blocks() if block.block_hash is None]
        for cache in parts[0].layout._mover._views if free else ():
            cache[free] = _GARBAGE

    def _step(self) -> None:
        for output in self._core.step():
            name = output.request_id
            if name not in self._sent:
                continue
            sent = self._sent[name]
            sent.answer = list(output.outputs[0].token_ids)
            if output.finished:
                del self._sent[name]
                self.counts["answers"] += 1
                self.longest_s = max(self.longest_s, time.monotonic() - sent.since)
                assert sent.answer == sent.right, f"seed {self._seed}: {name}: {sent}"
        now = time.monotonic()
        late = [name for name, sent in self._sent.items() if now - sent.since > WAIT_MAX_S]
        assert not late, f"seed {self._seed}: {late} do not end; {left_behind(self._engine)}"

    def _assert_idle(self) -> None:
        def idle() -> bool:
            self._engine.flush()
            self._engine.outputs([[1]], 1)  # an idle engine runs no step, and workers report only in steps
            return not self._engine.scheduler.requests and not left_behind(self._engine)

        try:
            wait_for(idle)
        except AssertionError:
            raise AssertionError(f"seed {self._seed}: left behind: {left_behind(self._engine)}") from None
        free, blocks = self._engine.free_blocks(), self._engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        assert free == blocks - 1, f"seed {self._seed}: {blocks - 1 - free} blocks are in use without a request"


def left_behind(engine: Any) -> dict[str, Any]:
    """Return the plugin's data about requests, by name; all of it is empty after all requests have ended."""
    side, worker = engine.connector._scheduler, engine.worker
    kept: dict[str, Any] = {name: getattr(side, name) for name in _OF_SCHEDULER}
    kept |= {name: getattr(worker.loads, name) for name in _OF_LOADS}
    kept |= {"layerwise": worker.loads.layers.requests, "saves": worker.stores._saves}
    kept |= {"loaded": worker.loads._report.loaded, "seconds": worker.loads._report.seconds}
    kept |= {"lookups": side._lookup._lookups, "published": side._lookup.publications._published}
    kept |= {"waiting": side.waiting._entries, "begun": side.waiting._begun}
    if side._policy_runner is not None:
        kept["first tokens"] = side._policy_runner._waiting
        kept["policy"] = side._policy_runner._policy._queued
    for key, manager in worker.loads.managers.items():
        kept |= {f"{name} {key}": getattr(manager, name) for name in _OF_MANAGER}
    return {name: list(value) for name, value in kept.items() if value}


_OF_SCHEDULER: Final = ("_requests", "_loads")
_OF_LOADS: Final = ("_results", "_bad_blocks", "_failed")
_OF_MANAGER: Final = ("_outstanding", "_queue", "_completion")


class Processes(Faults):
    """Real processes that are killed and restarted, or stopped for some steps."""

    def __init__(self, processes: Sequence[Any]) -> None:
        self._processes = processes
        self._frozen: Any = None

    def turn(self, chance: random.Random) -> None:
        luck = chance.random()
        if luck < 0.03:
            self.calm()
        if luck < 0.01:
            process = chance.choice(self._processes)
            if chance.random() < 0.5:
                process.kill()
                process.restart()
            else:
                process.freeze(True)
                self._frozen = process

    def calm(self) -> None:
        if self._frozen is not None:
            self._frozen.freeze(False)
            self._frozen = None


@dataclass(frozen=True)
class Kind:
    """An engine and its data plane."""

    extra: dict[str, Any] = field(default_factory=dict)  # configuration of the plugin
    options: dict[str, Any] = field(default_factory=dict)  # options of vLLM
    family: str = "llama"
    devices: int | None = None  # of the data plane's tiers; None for a scripted data plane, which has no devices
    storage: bool = False  # there is storage below the tiers
    streams: bool = False  # several loads of a step go layer by layer side by side, whatever is predicted


_UNSHARED: Final = {"enable_prefix_caching": False}
_LARGE: Final = {"num_gpu_blocks_override": 120, "max_num_batched_tokens": 640}
"""Several prompts fit a step."""
KINDS: Final = {
    "layers": Kind({"layer_order": True, "interference_budget": 0}),
    "ring": Kind({"layer_order": True, "interference_budget": 1, "fetch_buffer_bytes": "4KiB"}),
    "streams": Kind({"layer_order": True, "fetch_buffer_bytes": "4KiB"}, _UNSHARED | _LARGE, streams=True),
    "tiers-ring": Kind(
        {"layer_order": True, "interference_budget": 1, "fetch_buffer_bytes": "4KiB"},
        devices=1,
        storage=True,
        streams=True,
    ),
    "auto": Kind(
        {"layer_order": "auto", "interference_budget": 1, "fetch_buffer_bytes": "4KiB"}, devices=1, storage=True
    ),
    "decides": Kind({"layer_order": True, "fetch_or_recompute": True}),
    "waits": Kind({"asynchronous_fetch": False}),
    "waits-windows": Kind({"asynchronous_fetch": False}, {"num_gpu_blocks_override": 260}, "gemma3"),
    "preempts": Kind(options=_UNSHARED),
    "priorities": Kind({"layer_order": True}, {"scheduling_policy": "priority"}),
    "windows": Kind(options={"num_gpu_blocks_override": 260}, family="gemma3"),
    "pages": Kind({"pages": True, "layer_order": True}, devices=2),
    "pages-preempts": Kind({"pages": True}, _UNSHARED, devices=2),
    "tiers": Kind({"layer_order": True, "fetch_or_recompute": True}, devices=1, storage=True),
    "tiers-preempts": Kind({"interference_budget": 0}, _UNSHARED, devices=0, storage=True),
}


@contextmanager
def _behind(kind: Kind, folder: Path) -> Iterator[tuple[str, Faults]]:
    """Yield the address of a kind's data plane, and its faults."""
    from stack import Process

    with ExitStack() as ends:
        if kind.devices is None:
            plane = ScriptedDataPlane()
            ends.callback(plane.stop)
            yield plane.address, Script(plane)
            return
        processes = []
        if kind.storage:
            processes.append(Process("storage", "--port", str(free_port())))
            ends.callback(processes[-1].stop)
        devices = [{"path": str(folder / f"device-{number}"), "size": "64MiB"} for number in range(kind.devices)]
        tiers = json.dumps({"memory_budget_bytes": "64MiB", "devices": devices})
        storage = processes[0].address if processes else ""
        processes.append(Process("dpu", "--listen", f"127.0.0.1:{free_port()}", "--storage", storage, "--tiers", tiers))
        ends.callback(processes[-1].stop)
        yield processes[-1].address, Processes(processes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one kind; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS, nargs="?", default="layers")
    parser.add_argument("--list", action="store_true", help="print the kinds")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    options = parser.parse_args(arguments)
    if options.list:
        print(*KINDS)
        return 0
    from engine import Engine

    kind = KINDS[options.kind]
    settings = _ENGINE | kind.options
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = write_model(kind.family, folder / "model")
        plain = Engine(model, None, **settings | _UNSHARED)
        expected = list(zip(prompts(), plain.outputs(prompts(), GENERATED), strict=True))
        plain.close()
        total: dict[str, int] = {}
        with _behind(kind, folder) as (address, faults):
            extra = {"computing_cache": "none", "layer_order": False, **_DEADLINES, **kind.extra}
            engine = Engine(model, address, extra=extra, **settings)
            seed, ends = options.seed, time.monotonic() + options.seconds
            while seed == options.seed or time.monotonic() < ends:
                priorities = "scheduling_policy" in settings
                stress = Stress(engine, expected, faults, seed, priorities=priorities, streams=kind.streams)
                stress.run(_REQUESTS)
                total = {name: total.get(name, 0) + count for name, count in stress.counts.items()}
                seed += 1
            counters = engine.counters()
            loaded, streams = counters.get("loaded_tokens", 0), counters.get("layerwise_loads", 0)
            engine.close()
    print(json.dumps({"seeds": seed - options.seed, **total, "loaded_tokens": loaded, "streams": streams}))
    streams = streams or kind.extra.get("layer_order") != "auto"
    return int(not (loaded and streams and all(total[name] for name in ("answers", "aborts", "resets"))))


if __name__ == "__main__":
    sys.exit(main())

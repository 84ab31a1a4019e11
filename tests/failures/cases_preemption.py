"""A real engine with too little memory for its requests: saved KV of preempted requests is lost, damaged, or late."""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Iterator

import faults
from callers import Prompt
from cases import MEMORY, POOL, Context, case
from nodes import DataPlane, tiers
from outcomes import Outcome

from shadowserve.cores import usable_cores
from shadowserve.errors import ShadowServeError
from shadowserve_tools.bench.parts.engine import BLOCK_TOKENS, prompt, write_weights
from shadowserve_tools.bench.parts.serving import VOCABULARY, Engine, Load, Model, plugin, started_engine

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling vLLM's small functions takes 15 s of a core

_PROMPT, _OUTPUT = 80, 100
_REQUESTS, _FIT = 6, 3
_FETCH_TIMEOUT_S = 1.0
_SERVE_S = 90.0
_MODEL = Model(layers=2, hidden=64, heads=2, head_size=32)
_KV_BYTES = 2 * _MODEL.kv_bytes


def _engine(context: Context, data_plane: str) -> contextlib.AbstractContextManager[Engine]:
    """Run vLLM in a process, with memory for only some of its requests."""
    folder = context.folder / "model"
    folder.mkdir()
    config = _MODEL.config(_PROMPT + _OUTPUT + BLOCK_TOKENS)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, config)
    host = {
        "data_plane": data_plane,
        "chunk_tokens": 2 * BLOCK_TOKENS,
        "load_tokens_min": 1,
        "identity_cache": "none",
        "fetch_timeout_s": _FETCH_TIMEOUT_S,
        "breaker_backoff_max_s": 0.2,
    }
    return started_engine(
        "engine",
        context.folder,
        context.chance.sample(usable_cores(), 1),
        _MODEL,
        Load(chunks=1, documents=1, running_max=_REQUESTS),
        plugin(host),
        max_num_batched_tokens=96,
        max_model_len=_PROMPT + _OUTPUT + BLOCK_TOKENS,
        kv_cache_memory_bytes=(_FIT * -(-(_PROMPT + _OUTPUT) // BLOCK_TOKENS) + 1) * BLOCK_TOKENS * _KV_BYTES,
        dtype="float32",
    )


class _Pressed:
    """An engine with more requests than memory. It knows the answer to each request alone."""

    def __init__(self, context: Context, plane: DataPlane) -> None:
        self._context = context
        self._engine = context.enter(_engine(context, plane.address))
        self._prompts = [prompt(100 * context.seed + number, _PROMPT, VOCABULARY) for number in range(_REQUESTS)]
        self._engine.call("hits", way="compute")
        self._engine.call("reading", only=True)
        self._answers = [self._alone(tokens) for tokens in self._prompts]
        for tokens, answer in zip(self._prompts, self._answers, strict=True):
            other = [*prompt(-1 - context.seed, BLOCK_TOKENS, VOCABULARY), *tokens[BLOCK_TOKENS:]]
            assert self._alone(other) != answer, "two prompts have the same answer, so the comparison proves nothing"
        self._engine.call("reading", only=False)
        self._engine.call("hits", way="fetch")
        self._counted = self._engine.call("counters")

    def _alone(self, tokens: list[int], output: int = _OUTPUT) -> list[int]:
        (result,) = self._engine.call("serve", requests=[{"prompt": tokens, "output": output, "at": 0.0}])
        return list(result["answer"])

    def serve(self) -> dict[str, int]:
        """Send all requests at once and judge the answers. Return the increase of the plugin's counters."""
        tally, began = self._context.tally, time.monotonic()
        requests = [{"prompt": tokens, "output": _OUTPUT, "at": 0.0} for tokens in self._prompts]
        try:
            results = self._engine.call("serve", timeout_s=_SERVE_S, requests=requests)
        except ShadowServeError:
            tally.note(Outcome.HANG, f"requests without an answer after {time.monotonic() - began:.0f} s")
            raise
        assert self._engine.call("pressure")["preemptions"], "the case needs preemptions"
        for result, answer in zip(results, self._answers, strict=True):
            right = result["answer"] == answer
            tally.note(Outcome.RIGHT if right else Outcome.WRONG, "" if right else "request: other tokens")
        self._alone(self._prompts[0][:2], 2)  # each step updates the counters
        before, self._counted = self._counted, self._engine.call("counters")
        counted = {name: value - before.get(name, 0) for name, value in self._counted.items()}
        if counted["restored_tokens"] < counted["saved_tokens"]:
            tally.note(Outcome.MISSED, "load: fewer chunks are present than were saved")
        for name, value in counted.items():
            kind, _, reason = name.partition("/")
            what = {"load_failures": "load", "lookup_failures": "lookup", "dropped_stores": "save"}.get(kind)
            for _ in range(int(value) if what else 0):
                tally.note(Outcome.MISSED, f"{what}: {reason}")
        return counted

    @contextlib.contextmanager
    def serving(self, *others: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """Serve repeatedly until the context ends; then without a fault, until preempted requests are loaded."""
        with contextlib.ExitStack() as works:
            for work in (self._context.beside(self.serve), *others):
                works.enter_context(work)
            yield
        self.repaired()

    def repaired(self) -> None:
        ends = time.monotonic() + _SERVE_S
        while not (counted := self.serve())["restored_tokens"] or any(
            value for name, value in counted.items() if name.startswith("load_failures")
        ):
            assert time.monotonic() < ends, f"the engine loads nothing: {counted}"


def _filling(context: Context, plane: DataPlane) -> contextlib.AbstractContextManager[None]:
    host, numbers = context.host(plane.address), itertools.count()
    return context.beside(lambda: host.store(Prompt(f"{context.seed}/{next(numbers)}", 6)))


@case("server SIGKILL", MEMORY, repetitions=1)
def preempted_storage_killed(context: Context) -> None:
    """While an engine saves what it preempts there, and loads it again; restarted, empty."""
    storage = context.storage()
    with _Pressed(context, context.data_plane(storage.port)).serving():
        context.kills(storage, 2, (0.3, 0.8), (0.3, 0.8))


@case("half-open TCP", MEMORY, repetitions=1)
def preempted_save_hangs(context: Context) -> None:
    """Between data plane and storage, while an engine saves there what it preempts: beyond a load's deadline."""
    proxy = context.proxy(context.storage().port)
    with _Pressed(context, context.data_plane(proxy.port)).serving():
        context.pause(0.1, 0.4)
        with proxy.silenced():
            time.sleep(4 * _FETCH_TIMEOUT_S)


@case("bit rot on the wire", MEMORY, repetitions=1)
def preempted_records_flip(context: Context) -> None:
    """Between data plane and storage, where an engine saves what it preempts, and loads it again."""
    proxy = context.proxy(context.storage().port)
    pressed = _Pressed(context, context.data_plane(proxy.port))
    proxy.flip_one_in = 4
    pressed.serve()
    pressed.serve()
    proxy.flip_one_in = 0
    assert proxy.flipped
    pressed.repaired()


@case("bit rot on disk", POOL, repetitions=1)
def preempted_records_rot(context: Context) -> None:
    """A bit of each record that an engine has saved of what it preempts, on a data plane's tier with little memory."""
    disk = context.folder / "tier" / "disk"
    plane = context.data_plane(0, tiers=tiers("1MiB", disk, "64MiB", objects_max=4000))
    rotten = set[tuple[int, int]]()
    with _Pressed(context, plane).serving(_filling(context, plane)):  # the memory then has few of the engine's records
        ends = time.monotonic() + 3
        while time.monotonic() < ends:
            for stored in faults.objects([disk]):
                if (stored.offset, stored.generation) not in rotten:
                    rotten.add((stored.offset, stored.generation))
                    faults.rot(stored, context.chance)
            time.sleep(0.02)
        assert rotten


@case("memory taken back", POOL, repetitions=1)
def preempted_records_evicted(context: Context) -> None:
    """Another host fills the tiers while an engine saves there what it preempts, before it runs again."""
    plane = context.data_plane(0, tiers=tiers("1MiB"))
    with _Pressed(context, plane).serving(_filling(context, plane)):
        time.sleep(3)


@case("daemon loss", POOL)
def preempted_daemon_killed(context: Context) -> None:
    """SIGKILL, again and again, while an engine saves what it preempts in tiers of memory; restarted, empty."""
    plane = context.data_plane(0, tiers=tiers("16MiB"))
    with _Pressed(context, plane).serving():
        context.kills(plane, 4, (0.1, 0.8), (0.0, 0.3))


@case("daemon loss", MEMORY, repetitions=1)
def preempted_tiers_away(context: Context) -> None:
    """SIGKILL of a data plane whose tiers have what an engine has saved of preempted requests; restarted without."""
    plane = context.data_plane(context.storage().port, tiers=tiers("16MiB"))
    with _Pressed(context, plane).serving():
        context.pause(0.3, 0.8)
        plane.kill()
        del plane.options["tiers"]
        plane.start()
        context.pause(0.3, 0.8)


@case("daemon loss", POOL, repetitions=1)
def preempted_daemon_frozen(context: Context) -> None:
    """SIGSTOP beyond the deadline of loads, while an engine saves and loads what it preempts."""
    plane = context.data_plane(0, tiers=tiers("16MiB"))
    with _Pressed(context, plane).serving():
        for _ in range(2):
            context.pause(0.1, 0.6)
            with plane.frozen():
                time.sleep(2 * _FETCH_TIMEOUT_S)

"""Real engines, their data planes and a storage node, each on its own cores.

Engines have one half of the cores; data planes and the storage node have the other. Each program is confined from its
start. :meth:`Stack.decoding_in_engine` moves the decoding threads of a running data plane, so that systems that differ
in nothing else take turns within seconds.
"""

import contextlib
import json
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shadowserve.calibration import PRESETS, Calibration
from shadowserve.cores import on_cores, usable_cores
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.engine import model_config, prompt, write_weights
from shadowserve_tools.bench.parts.options import Decorator, grouped, whole
from shadowserve_tools.bench.parts.workload import STEP_OF_SPREAD
from shadowserve_tools.bench.peers.network import LOOPBACK, Network
from shadowserve_tools.processes import Child, JsonProcess, start_data_plane, start_storage

DECODING_THREADS: Final = ("ss-decomp", "ss-dequant", "ss-dma")
"""Names of the data plane's threads between receiving and the engine's memory."""
VOCABULARY: Final = 2048
TAIL_TOKENS: Final = 16
"""Tokens after a prompt's chunks: the user's question about a document. They are always computed."""
START_TIMEOUT_S: Final = 300.0
ANSWER_TIMEOUT_S: Final = 300.0
LATE: Final = dict.fromkeys(("lookup_timeout_s", "fetch_timeout_s", "store_timeout_s"), 60)
"""Keys of the plugin's configuration: a late transfer is measured as late, and not computed instead."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Shape of a Llama with random weights. Its KV is normally distributed, with all channels alike."""

    layers: int
    hidden: int
    heads: int
    head_size: int

    @property
    def kv_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.head_size * 2

    def config(self, tokens: int) -> dict[str, Any]:
        """Return its ``config.json``, for ``tokens`` of prompt and answer together."""
        return model_config(**vars(self), vocabulary=VOCABULARY, tokens=tokens)


@dataclass(frozen=True)
class Partition:
    """Cores of the engine, and cores of the data plane and the storage node."""

    engine: tuple[int, ...]
    data_plane: tuple[int, ...]

    @classmethod
    def halves(cls) -> "Partition":
        cores = usable_cores()
        if len(cores) < 2:
            raise ShadowServeError("this takes two cores, one for the engine and one for the data plane; there is one")
        half = len(cores) // 2
        return cls(tuple(cores[:half]), tuple(cores[half:]))


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of an open loop about some documents in turn, all with the same number of tokens.

    Attributes:
        chunks: Chunks of 256 tokens in each document.
        rate: Requests per second, Poisson; 0 sends all at once.
        running_max: Most requests that an engine runs at one time.
    """

    chunks: int
    documents: int
    output: int = 1
    requests: int = 1
    rate: float = 0.0
    seed: int = 1
    running_max: int = 1

    @classmethod
    def of_prompt(cls, tokens: int, **more: Any) -> "Load":
        """Return a load for prompts of up to ``tokens`` tokens."""
        return cls(chunks=-(-tokens // DEFAULT_CHUNK_TOKENS), documents=1, **more)

    @property
    def prompt_tokens(self) -> int:
        return self.chunks * DEFAULT_CHUNK_TOKENS + TAIL_TOKENS

    @property
    def tokens_max(self) -> int:
        """Tokens that an engine has to hold of a request, with some to spare."""
        return self.prompt_tokens + self.output + DEFAULT_CHUNK_TOKENS

    def orders(self) -> list[dict[str, Any]]:
        times = arrivals(self.requests, self.rate, self.seed)
        return [
            {"seed": index % self.documents, "tokens": self.prompt_tokens, "output": self.output, "at": at}
            for index, at in enumerate(times)
        ]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return the arrival times of a Poisson process in seconds. The same seed gives the same times."""
    generator = random.Random(seed)
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += generator.expovariate(rate) if rate else 0.0
    return times


@dataclass
class Served:
    """Times of served requests: to the first token, and of each further token; ``seconds`` until the last one ended."""

    ttft_s: list[float]
    tpot_s: list[float]
    seconds: float

    @classmethod
    def of(cls, runs: Sequence["Served"]) -> "Served":
        ttfts, tpots = ([each for run in runs for each in getattr(run, name)] for name in ("ttft_s", "tpot_s"))
        return cls(ttfts, tpots, sum(run.seconds for run in runs))

    @property
    def throughput(self) -> float:
        return len(self.ttft_s) / self.seconds

    @property
    def ttft(self) -> float:
        return statistics.fmean(self.ttft_s)

    @property
    def tpot(self) -> float:
        return statistics.fmean(self.tpot_s)

    def columns(self) -> dict[str, float]:
        return {
            "req_per_s": self.throughput,
            "ttft_ms": self.ttft * 1e3,
            "ttft_p95_ms": p95(self.ttft_s) * 1e3,
            "tpot_ms": self.tpot * 1e3,
            "tpot_p95_ms": p95(self.tpot_s) * 1e3,
        }


def p95(values: Sequence[float]) -> float:
    """Return the 95th percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


class Engine(JsonProcess):
    """An engine process; :mod:`shadowserve_tools.bench.parts.engine` has its orders."""

    def call(self, order: str, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> Any:
        """Send an order and return its answer."""
        self.send({"order": order, **arguments})
        return self.receive(timeout_s)["result"]

    def ask(self, tokens: Sequence[int], output: int = 1, cached: int | None = None, **more: Any) -> dict[str, Any]:
        """Serve a prompt and return its result, which must have fetched ``cached`` tokens."""
        request = {"prompt": list(tokens), "output": output, "at": 0.0}
        (result,) = self.call("serve", requests=[request], **more)
        found: dict[str, Any] = result
        if cached is not None:
            check_cached(found, cached)
        return found

    def serve(self, load: Load, *, fetched: bool) -> Served:
        """Serve a load, of which every chunk must be fetched, or none."""
        results = self.call("serve", requests=load.orders())
        for result in results:
            check_cached(result, load.chunks * DEFAULT_CHUNK_TOKENS if fetched else 0)
        ttfts, tpots = ([result[name] for result in results] for name in ("ttft_s", "tpot_s"))
        return Served(ttfts, tpots, max(result["end_s"] for result in results))


def check_cached(result: dict[str, Any], cached: int, what: str = "a prompt") -> None:
    """Check where a request's KV came from."""
    if result["cached"] != cached:
        raise ShadowServeError(f"{what}: {result['cached']} tokens were not computed, instead of {cached}")


def check_answer(result: dict[str, Any], answer: list[int]) -> None:
    """Compare an answer with the one of an engine without a cache."""
    if result["answer"] != answer:
        raise ShadowServeError(f"{result['answer']} with a cache, {answer} without")


def check_depends(answer: list[int], other: list[int]) -> None:
    """Check that another prompt has another answer."""
    if answer == other:
        raise ShadowServeError("the answer does not depend on the prompt: equal answers would show nothing")


def made_up(tokens: int, seed: int | None = None) -> list[int]:
    """Return a prompt; each length has its own, so that nothing of it is stored yet."""
    return prompt(tokens if seed is None else seed, tokens, VOCABULARY)


def write_model(folder: Path, model: Model, load: Load) -> None:
    """Write the model that the engines of ``folder`` share, with weights for which answers depend on prompts."""
    config = model.config(load.tokens_max)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model", config)


def write_calibration(folder: Path, file: Path) -> None:
    """Write a calibration of the model in ``folder`` with steps of ``STEP_OF_SPREAD``."""
    from shadowserve_tools.bench.parts.real_model import RealModel  # it loads torch

    used = RealModel(folder / "model")
    plain = used.plain(used.prefill(made_up(DEFAULT_CHUNK_TOKENS)))
    presets = dict.fromkeys(PRESETS, (STEP_OF_SPREAD * plain.std(dim=2)).numpy())
    Calibration(used.name, used.architecture, used.rope, presets, plain.mean(dim=2).numpy(), used.frequencies).write(
        file
    )


ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The process's mask binds all threads; vLLM's own binding would leave one of the cores idle.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment of every engine."""


@contextlib.contextmanager
def started_engine(
    name: str,
    folder: Path,
    cores: Sequence[int],
    model: Model,
    load: Load,
    transfer: dict[str, Any] | None = None,
    *,
    packages: Sequence[Path] = (),
    **more: Any,
) -> Iterator[Engine]:
    """Run an engine on ``cores`` while the context lasts.

    Args:
        name: Name of its log.
        folder: Folder of the log and of the model, which all engines of a folder share. Without a model, weights
            are random.
        load: Largest load that the engine has to hold.
        transfer: Configuration of the KV connector; None for plain vLLM.
        more: Options of ``vllm.LLM`` that do not follow from the load.
    """
    options: dict[str, Any] = {
        "model": str(folder / "model"),
        "load_format": "auto" if (folder / "model" / "model.safetensors").exists() else "dummy",
        "max_model_len": load.tokens_max,
        "max_num_seqs": load.running_max,
        "kv_cache_memory_bytes": model.kv_bytes * load.tokens_max * (load.running_max + 1),
        "dtype": "bfloat16",
        # Every request must be fetched or computed, not served from an earlier one's blocks.
        "enable_prefix_caching": False,
    }
    if transfer:
        options["kv_transfer_config"] = transfer | {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    settings = {
        "config": model.config(load.tokens_max),
        "vocabulary": VOCABULARY,
        "packages": list(map(str, packages)),
        "options": options | more,
    }
    command = [sys.executable, "-m", "shadowserve_tools.bench.parts.engine"]
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": str(len(cores))}
    with on_cores(cores):
        engine = Engine("the engine", command, folder / f"{name}.log", environment)
    try:
        engine.send(settings)
        engine.receive(START_TIMEOUT_S)
        yield engine
    finally:
        engine.stop()


def plugin(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of ShadowServe's connector with these keys of section ``host``.

    What an engine learns is not kept from one start to the next, so that runs are independent. For the same reason,
    measured times do not choose between chunk order and layer order.
    """
    return {
        "kv_connector": "ShadowServeConnector",
        "kv_connector_module_path": "host_control.vllm.connector",
        "kv_connector_extra_config": {"computing_cache": "none", "layer_order": False, **config},
    }


def shape_options(layers: int, hidden: int, heads: int, head_size: int) -> Decorator:
    """Add options for the shape of the engine's model to a command; its argument is ``model``."""
    options = {
        "layers": whole("--layers", layers, "Layers of the engine's model."),
        "hidden": whole("--hidden", hidden, "Hidden size of the model.", 32),
        "heads": whole("--heads", heads, "Heads, and KV heads."),
        "head_size": whole("--head-size", head_size, "Size of a head.", 32),
    }
    return grouped("model", Model, options)


def model_options(*, layers: int = 8, chunks: int = 6, running_max: int = 8) -> Decorator:
    """Add options for model and prompts to a command; its arguments are ``model`` and ``load``."""
    options = {
        "chunks": whole("--prompt-chunks chunks", chunks, "Chunks of 256 tokens in a prompt."),
        "documents": whole("--documents", 4, "Number of documents."),
        "running_max": whole("--requests-max running_max", running_max, "Requests that run at one time."),
    }
    shape, load = shape_options(layers, 512, 16, 128), grouped("load", Load, options)
    return lambda command: shape(load(command))


class Host:
    """The programs around engines of one model.

    Args:
        load: Largest load of an engine.
    """

    def __init__(self, stack: ExitStack, folder: Path, model: Model, load: Load, network: Network = LOOPBACK) -> None:
        self.stack, self.folder, self.model, self.load, self.network = stack, folder, model, load, network
        self.partition = Partition.halves()
        self.password = "" if network is LOOPBACK else secrets.token_hex(16)  # required beyond loopback
        # Keep the benchmark's own threads off the engine's cores.
        stack.enter_context(on_cores(self.partition.data_plane))

    @property
    def document_bytes(self) -> int:
        return self.load.chunks * DEFAULT_CHUNK_TOKENS * self.model.kv_bytes

    def start_storage(self, *flags: str, **environment: str) -> Child:
        flags = ("--host", self.network.host, "--cores", json.dumps(self.partition.data_plane), *flags)
        if self.password:
            environment["SHADOWSERVE_STORAGE_PASSWORD"] = self.password
        with self.network.store_side():
            return self.stack.enter_context(start_storage(self.folder, *flags, environment=environment))

    def start_plane(
        self,
        storage: str,
        *flags: str,
        stack: ExitStack | None = None,
        place: str = "",
        side: Callable[[], AbstractContextManager[None]] | None = None,
        cores: Sequence[int] = (),
    ) -> Child:
        """Start a data plane that listens on ``dpu.sock`` in folder ``place``, at the clients' end by default."""
        folder = self.folder / place
        folder.mkdir(exist_ok=True)
        chosen = cores or self.partition.data_plane
        flags = ("--listen", f"unix:{folder}/dpu.sock", "--cores", json.dumps(chosen), *flags)
        environment = {"SHADOWSERVE_DPU_STORAGE_PASSWORD": self.password} if self.password else {}
        with (side or self.network.client_side)(), on_cores(cores) if cores else nullcontext():
            return (stack or self.stack).enter_context(
                start_data_plane(folder, storage, *flags, environment=environment)
            )

    def plugin(self, plane: Child, **keys: Any) -> dict[str, Any]:
        """Return the configuration of the connector to a data plane."""
        shared: dict[str, Any] = {"data_plane": plane.address, "identity_cache": str(self.folder / "content.json")}
        return plugin(shared | LATE | keys)

    def start_engine(
        self, name: str, transfer: dict[str, Any] | None = None, stack: ExitStack | None = None, **more: Any
    ) -> Engine:
        """Start an engine, see :func:`started_engine`; it ends with ``stack``, by default with everything else."""
        starting = started_engine(name, self.folder, self.partition.engine, self.model, self.load, transfer, **more)
        return (stack or self.stack).enter_context(starting)


class Stack(Host):
    """Storage node, data plane and engine, each on its cores; all end with ``stack``.

    Args:
        load: Largest load that the engine has to hold.

    Attributes:
        engine: Engine with the plugin. Everything that the load needs is stored.
    """

    def __init__(self, stack: ExitStack, model: Model, load: Load) -> None:
        super().__init__(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())), model, load)
        self.storage = self.start_storage()
        self._plane = stack.enter_context(ExitStack())
        self.data_plane = self.start_plane(self.storage.address, stack=self._plane)
        # Fetches run at full speed: their effect on the engine is measured.
        keys = {"store_buffer_bytes": self.document_bytes, "breaker_backoff_max_s": 0.25, "interference_budget": 0}
        self.engine = self.start_engine("engine", self.plugin(self.data_plane, **keys))
        stack.callback(self._plane.close)
        stored = self.engine.call("store", seeds=list(range(load.documents)), tokens=load.prompt_tokens)
        if stored != load.documents * load.chunks:
            raise ShadowServeError(f"{stored} chunks were stored of {load.documents * load.chunks}")

    def restart_data_plane(self, *flags: str) -> None:
        """Restart the data plane with other flags at its old address; the engine registers again."""
        self._plane.close()
        self.data_plane = self.start_plane(self.storage.address, *flags, stack=self._plane)
        time.sleep(2 * 0.25)  # the plugin's circuit breaker may have opened
        self.engine.call("serve", requests=[{"seed": 0, "tokens": self.load.prompt_tokens, "output": 1, "at": 0.0}])

    def start_keeping(self) -> Engine:
        """Start plain vLLM with every document in its prefix cache."""
        room = self.model.kv_bytes * self.load.tokens_max * (self.load.documents + self.load.running_max + 1)
        engine = self.start_engine("keeping", enable_prefix_caching=True, kv_cache_memory_bytes=room)
        first = replace(self.load, requests=self.load.documents, output=1, rate=0.0)
        engine.call("serve", requests=first.orders())
        return engine

    @contextlib.contextmanager
    def decoding_in_engine(self) -> Iterator[None]:
        """Run the data plane's decoding threads, and no others, on the engine's cores while the context lasts."""
        self._place_decoding(self.partition.engine)
        try:
            yield
        finally:
            self._place_decoding(self.partition.data_plane)

    def _place_decoding(self, cores: Sequence[int]) -> None:
        tasks = Path(f"/proc/{self.data_plane.process.pid}/task").iterdir()
        decoding = [int(task.name) for task in tasks if (task / "comm").read_text().startswith(DECODING_THREADS)]
        if not decoding:
            raise ShadowServeError(f"no thread of the data plane is called {' or '.join(DECODING_THREADS)}")
        for task in decoding:
            os.sched_setaffinity(task, cores)

"""A real engine, a data plane and a storage node, each on its own cores.

The engine has one set of cores; data plane and storage node have another. Each program is confined from its start.
:meth:`Stack.decoding_in_engine` moves the decoding threads of a running data plane, so that systems that differ in
nothing else take turns within seconds.
"""

import contextlib
import functools
import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import click

from shadowserve.cores import on_cores, usable_cores
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.engine import model_config, write_weights
from shadowserve_tools.processes import Child, start_data_plane, start_storage

DECODING_THREADS: Final = ("ss-decomp", "ss-dequant", "ss-dma")
"""Names of the data plane's threads between receiving and the engine's memory."""
VOCABULARY: Final = 2048
TAIL_TOKENS: Final = 16
"""Tokens after a prompt's chunks: the user's question about a document. They are always computed."""
START_TIMEOUT_S: Final = 300.0
ANSWER_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, kw_only=True)
class Model:
    """Shape of a Llama with random weights. Its KV is normally distributed, with all channels alike."""

    layers: int
    hidden: int
    heads: int
    head_size: int

    @property
    def kv_bytes(self) -> int:
        """KV bytes of a token, in bfloat16."""
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
        """Divide the cores of this process into two halves.

        Raises:
            ShadowServeError: There is only one core.
        """
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
        documents: Number of documents.
        output: Tokens of each answer.
        requests: Number of requests.
        rate: Requests per second, Poisson; 0 sends all at once.
        seed: Seed of the arrivals.
    """

    chunks: int
    documents: int
    output: int = 1
    requests: int = 1
    rate: float = 0.0
    seed: int = 1

    @property
    def prompt_tokens(self) -> int:
        return self.chunks * DEFAULT_CHUNK_TOKENS + TAIL_TOKENS

    def orders(self) -> list[dict[str, Any]]:
        """Return the requests in the engine's format."""
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
    """Times of served requests.

    Attributes:
        ttft_s: Time to the first token of each request.
        tpot_s: Time of each further token, by request.
        requests: Number of requests.
        seconds: Time until the last one ended.
    """

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    requests: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, runs: Sequence["Served"]) -> "Served":
        """Return several runs as one."""
        return cls(
            [ttft for run in runs for ttft in run.ttft_s],
            [tpot for run in runs for tpot in run.tpot_s],
            sum(run.requests for run in runs),
            sum(run.seconds for run in runs),
        )

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    @property
    def ttft(self) -> float:
        """Mean time to the first token."""
        return statistics.fmean(self.ttft_s)

    @property
    def tpot(self) -> float:
        """Mean time of a further token."""
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


class Engine:
    """Client of an engine process; :mod:`shadowserve_tools.bench.parts.engine` has its orders."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self._log = log

    def call(self, order: str, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> Any:
        """Send an order and return its answer.

        Raises:
            ShadowServeError: The engine ended, or did not answer within ``timeout_s``.
        """
        return self.exchange({"order": order, **arguments}, timeout_s)

    def exchange(self, message: dict[str, Any], timeout_s: float) -> Any:
        """Send one line and return the result in the next one."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the message below has the log
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            raise ShadowServeError(
                f"the engine {'ended' if ready else 'gave no answer'}. The end of {self._log}:\n"
                f"{self._log.read_text(errors='replace')[-3000:]}"
            )
        return json.loads(line)["result"]

    def serve(self, load: Load, *, fetched: bool) -> Served:
        """Serve a load and check where its KV came from.

        Args:
            load: The requests.
            fetched: True if every chunk must be fetched, False if none may be.

        Raises:
            ShadowServeError: The KV of a prompt did not come from there.
        """
        results = self.call("serve", requests=load.orders())
        wanted = load.chunks * DEFAULT_CHUNK_TOKENS if fetched else 0
        for result in results:
            if result["cached"] != wanted:
                raise ShadowServeError(f"{result['cached']} tokens of a prompt were not computed, instead of {wanted}")
        return Served(
            ttft_s=[result["ttft_s"] for result in results],
            tpot_s=[result["tpot_s"] for result in results],
            requests=len(results),
            seconds=max(result["end_s"] for result in results),
        )

    def stop(self) -> None:
        """End the process, by force if it does not end in time."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def write_model(folder: Path, model: Model, load: Load) -> None:
    """Write the model that the engines of ``folder`` share, with weights for which answers depend on prompts."""
    config = model.config(load.prompt_tokens + load.output + DEFAULT_CHUNK_TOKENS)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    write_weights(folder / "model", config)


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
    requests_max: int,
    transfer: dict[str, Any] | None = None,
    *,
    step_tokens: int = 0,
    packages: Sequence[Path] = (),
    **more: Any,
) -> Iterator[Engine]:
    """Run an engine on ``cores`` while the context lasts.

    Args:
        name: Name of its log.
        folder: Folder of the log and of the model, which all engines of a folder share. Without a model, weights
            are random.
        cores: Cores of all its threads.
        model: Shape of the model.
        load: Largest load that the engine has to hold.
        requests_max: Number of requests that run at one time.
        transfer: Configuration of the KV connector; None for plain vLLM.
        step_tokens: Most tokens of one step; 0 for vLLM's default.
        packages: Additional folders of Python modules.
        more: ``kv_cache_bytes``, ``dtype`` or ``prefix_caching``, where they do not follow from the load.
    """
    tokens = load.prompt_tokens + load.output + DEFAULT_CHUNK_TOKENS
    settings = {
        "model": str(folder / "model"),
        "config": model.config(tokens),
        "load_format": "auto" if (folder / "model" / "model.safetensors").exists() else "dummy",
        "vocabulary": VOCABULARY,
        "max_tokens": tokens,
        "max_requests": requests_max,
        "kv_cache_bytes": model.kv_bytes * tokens * (requests_max + 1),
        "dtype": "bfloat16",
        # Every request must be fetched or computed, not served from an earlier one's blocks.
        "prefix_caching": False,
        "step_tokens": step_tokens,
        "packages": list(map(str, packages)),
        "transfer": transfer,
        **more,
    }
    log = folder / f"{name}.log"
    with log.open("w") as errors, on_cores(cores):
        process = subprocess.Popen(
            [sys.executable, "-m", "shadowserve_tools.bench.parts.engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(len(cores))},
            process_group=0,
        )
    engine = Engine(process, log)
    try:
        engine.exchange(settings, START_TIMEOUT_S)
        yield engine
    finally:
        engine.stop()


def plugin(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of ShadowServe's connector with these keys of section ``host``.

    What an engine learns is not kept from one start to the next, so that runs are independent.
    """
    return {
        "kv_connector": "ShadowServeConnector",
        "kv_connector_module_path": "host_control.vllm.connector",
        "kv_connector_extra_config": {"computing_cache": "none", **config},
    }


_Command = Callable[..., None]
_Decorator = Callable[[_Command], _Command]


def shape_options(layers: int, hidden: int, heads: int, head_size: int) -> _Decorator:
    """Add options for the shape of the engine's model to a command; its argument is ``model``."""
    count, width = click.IntRange(1), click.IntRange(32)
    options = (
        click.option("--layers", default=layers, show_default=True, type=count, help="Layers of the engine's model."),
        click.option("--hidden", default=hidden, show_default=True, type=width, help="Hidden size of the model."),
        click.option("--heads", default=heads, show_default=True, type=count, help="Heads, and KV heads."),
        click.option("--head-size", default=head_size, show_default=True, type=width, help="Size of a head."),
    )

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def with_shape(layers: int, hidden: int, heads: int, head_size: int, **options: Any) -> None:
            command(model=Model(layers=layers, hidden=hidden, heads=heads, head_size=head_size), **options)

        for option in reversed(options):
            with_shape = option(with_shape)
        return with_shape

    return decorate


def model_options_with(*, layers: int = 8, chunks: int = 6, requests_max: int = 8) -> _Decorator:
    """Add options for model and prompts to a command; its arguments are ``model``, ``load`` and ``requests_max``."""
    count = click.IntRange(1)
    options = (
        click.option(
            "--prompt-chunks",
            "chunks",
            default=chunks,
            show_default=True,
            type=count,
            help="Chunks of 256 tokens in a prompt.",
        ),
        click.option("--documents", default=4, show_default=True, type=count, help="Number of documents."),
        click.option(
            "--requests-max", default=requests_max, show_default=True, type=count, help="Requests that run at one time."
        ),
    )

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def with_load(chunks: int, documents: int, **options: Any) -> None:
            command(load=Load(chunks=chunks, documents=documents), **options)

        for option in reversed(options):
            with_load = option(with_load)
        return shape_options(layers, 512, 16, 128)(with_load)

    return decorate


model_options: Final = model_options_with()


class Stack:
    """Storage node, data plane and engine, each on its cores: ``with Stack(...) as stack``.

    Attributes:
        partition: Cores of the programs.
        engine: Engine with the plugin. Everything that the load needs is stored.
        data_plane: The running data plane.
    """

    def __init__(
        self,
        partition: Partition,
        model: Model,
        load: Load,
        requests_max: int,
        *,
        backend: str = "software",
        **host: Any,
    ) -> None:
        """Prepare programs for ``load``, the largest that the engine has to hold, with ``requests_max`` requests at
        a time.

        Args:
            backend: Backend of the data plane.
            host: Further keys of the plugin's configuration.
        """
        self.partition = partition
        self._backend = backend
        self._host = host
        self._model = model
        self._load = load
        self._requests_max = requests_max
        self._exit = contextlib.ExitStack()
        self._plane = contextlib.ExitStack()
        self.folder = Path()

    def __enter__(self) -> "Stack":
        try:
            self._start()
        except BaseException:
            self._exit.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._exit.close()

    def _start(self) -> None:
        # Keep the benchmark's own threads off the engine's cores.
        self._exit.enter_context(on_cores(self.partition.data_plane))
        self.folder = Path(self._exit.enter_context(tempfile.TemporaryDirectory()))
        cores = json.dumps(self.partition.data_plane)
        self.storage = self._exit.enter_context(start_storage(self.folder, "--cores", cores))
        self._exit.enter_context(self._plane)
        self.data_plane = self._start_data_plane("127.0.0.1:0")
        connector = {
            "data_plane": self.data_plane.address,
            "store_buffer_bytes": self._load.chunks * DEFAULT_CHUNK_TOKENS * self._model.kv_bytes,
            # A late transfer must be measured as late, not computed instead.
            "lookup_timeout_s": 60,
            "fetch_timeout_s": 60,
            "breaker_backoff_max_s": 0.25,
            # Fetches run at full speed: their effect on the engine is measured.
            "interference_budget": 0,
            **self._host,
        }
        self.engine = self._exit.enter_context(self.engine_with("engine", connector))
        self._exit.callback(self._plane.close)
        stored = self.engine.call("store", seeds=list(range(self._load.documents)), tokens=self._load.prompt_tokens)
        wanted = self._load.documents * self._load.chunks
        if stored != wanted:
            raise ShadowServeError(f"{stored} chunks were stored of {wanted}")

    def engine_with(self, name: str, plugin_config: Any = None) -> contextlib.AbstractContextManager[Engine]:
        """Run one more engine on the engine's cores; without a plugin configuration, plain vLLM."""
        transfer = plugin(plugin_config) if plugin_config else None
        return started_engine(
            name, self.folder, self.partition.engine, self._model, self._load, self._requests_max, transfer
        )

    @contextlib.contextmanager
    def engine_that_keeps(self) -> Iterator[Engine]:
        """Run plain vLLM on the engine's cores, with every document in its prefix cache."""
        documents = self._load.documents
        tokens = self._load.prompt_tokens + self._load.output + DEFAULT_CHUNK_TOKENS
        room = self._model.kv_bytes * tokens * (documents + self._requests_max + 1)
        with started_engine(
            "keeping", self.folder, self.partition.engine, self._model, self._load, self._requests_max,
            prefix_caching=True, kv_cache_bytes=room,
        ) as engine:  # fmt: skip
            first = replace(self._load, requests=documents, output=1, rate=0.0)
            engine.call("serve", requests=first.orders())
            yield engine

    def _start_data_plane(self, listen: str, *flags: str, environment: dict[str, str] | None = None) -> Child:
        cores = json.dumps(self.partition.data_plane)
        arguments = ("--listen", listen, "--cores", cores, "--backend", self._backend, *flags)
        starting = start_data_plane(self.folder, self.storage.address, *arguments, environment=environment)
        return self._plane.enter_context(starting)

    def restart_data_plane(self, *flags: str, environment: dict[str, str] | None = None) -> None:
        """Restart the data plane with other flags at its old address; the engine registers again."""
        self._plane.close()
        self.data_plane = self._start_data_plane(self.data_plane.address, *flags, environment=environment)
        time.sleep(2 * 0.25)  # the plugin's circuit breaker may have opened
        self.engine.call("serve", requests=[{"seed": 0, "tokens": self._load.prompt_tokens, "output": 1, "at": 0.0}])

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

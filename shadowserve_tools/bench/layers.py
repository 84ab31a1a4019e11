"""Measures loading layer by layer, so that the engine computes as soon as the first layer has arrived.

Method: real vLLM with ``layer_order``, a model of 24 small layers, and prompts whose first half is stored behind a
link. The link's rate is set so that the transfer takes 0.9 of the time of computing the rest. Each prompt is served
layer by layer and chunk by chunk, over the link and without it, in turns. Answers must equal those of the engine
without a cache, and another prefix must give another answer. With ``--s3`` the stored half is in a bucket behind the
node.

Prediction: with C the time of computing the rest, chunk by chunk needs 1.9 C and layer by layer 1.04 C: at most 1.83,
1.6 to 1.75 with lookup and scattering. ``remote_over_local`` 1.04. Without a link 1.0 to 1.05. S3 adds 2 %.
"""

import contextlib
import functools
import itertools
import json
import secrets
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from host_control.client import DataPlaneClient
from shadowserve.cores import on_cores
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.engine import prompt
from shadowserve_tools.bench.parts.serving import (
    VOCABULARY,
    Engine,
    Load,
    Model,
    Partition,
    plugin,
    shape_options,
    started_engine,
    write_model,
)
from shadowserve_tools.bench.parts.workload import client as store_client
from shadowserve_tools.bench.peers.buckets import CREDENTIALS, MISSING, ceph_gateway
from shadowserve_tools.bench.peers.network import Link, linked
from shadowserve_tools.processes import Programs, start_data_plane, start_storage, until
from shadowserve_tools.report import Output, Report, output_options

_LOCAL_GBIT_PER_S: Final = 100.0
"""Rate of a link without a limit: more than the cores move."""
_TCP_SHARE: Final = 0.957
"""Part of a link's rate that TCP carries."""
_TIMEOUT_S: Final = 120


class _System(NamedTuple):
    layerwise: bool
    over_link: bool
    cold: bool = False  # the store has the records in its bucket, not in memory


_CHUNKWISE, _LAYERWISE = "chunk by chunk, link", "layer by layer, link"
_CHUNKWISE_LOCAL, _LOCAL = "chunk by chunk, local", "layer by layer, local"
_S3: Final = "layer by layer, link, S3"
_SYSTEMS: Final = {
    _CHUNKWISE: _System(False, True),
    _LAYERWISE: _System(True, True),
    _S3: _System(True, True, cold=True),
    _LOCAL: _System(True, False),
    _CHUNKWISE_LOCAL: _System(False, False),
}
_BUCKET: Final = "kv-bench"
_FILL_BYTES: Final = 4 << 20
"""Size of a value that is no record, and so is stored in memory only."""
_ROUNDING_TOKENS: Final = 128
"""Tokens of a last block that is not full, and of vLLM's null block."""
_NO_CACHE: Final = "no cache"


@dataclass
class _Case:
    """A prompt with ``chunks`` stored chunks, and its times to the first token by system."""

    tokens: int
    chunks: int
    stored_bytes: int = 0
    gbit_per_s: float = 0.0
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def prefix_tokens(self) -> int:
        return self.chunks * DEFAULT_CHUNK_TOKENS

    @property
    def prompt(self) -> list[int]:
        """Tokens of the prompt. Each length has its own, so that nothing of it is stored yet."""
        return prompt(self.tokens, self.tokens, VOCABULARY)

    def pairs(self, system: str, other: str) -> list[float]:
        return [mine / its for mine, its in zip(self.ttft_s[system], self.ttft_s[other], strict=True)]


class Bed:
    """An engine, its data plane, and a store behind a link; ``host`` has more keys of the plugin's configuration.

    With ``one_request`` the engine has blocks for a single request, and others wait.
    """

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        network: Link,
        model: Model,
        tokens_max: int,
        connections: int,
        over_s3: bool = False,
        one_request: bool = False,
        **host: Any,
    ) -> None:
        partition = Partition.halves()
        stack.enter_context(on_cores(partition.data_plane))  # keep the benchmark's own threads off the engine's cores
        load = Load(chunks=-(-tokens_max // DEFAULT_CHUNK_TOKENS), documents=1)
        tokens = load.prompt_tokens + load.output + DEFAULT_CHUNK_TOKENS
        write_model(folder, model, load)
        password, cores = secrets.token_hex(16), json.dumps(partition.data_plane)
        buffer_bytes = load.chunks * DEFAULT_CHUNK_TOKENS * model.kv_bytes
        self._network, self._store_bytes = network, 4 * buffer_bytes + (64 << 20)
        flags = ["--host", network.host, "--cores", cores, "--memory-budget-bytes", str(self._store_bytes)]
        environment = {"SHADOWSERVE_STORAGE_PASSWORD": password}
        with network.store_side():
            if over_s3:
                endpoint = stack.enter_context(ceph_gateway(_BUCKET))
                below = {"bucket": _BUCKET, "endpoint": endpoint, "gather_s": 0.2, "timeout_s": _TIMEOUT_S / 2}
                flags += ["--s3", json.dumps(below)]
                environment |= CREDENTIALS
            storage = stack.enter_context(start_storage(folder, *flags, environment=environment))
            self._operator = stack.enter_context(store_client(storage.address, password))
        self._filled = itertools.count()
        self._chunks_stored = 0
        self.systems = [name for name, system in _SYSTEMS.items() if over_s3 or not system.cold]
        address = f"unix:{folder}/dpu.sock"
        self._start_plane = functools.partial(
            start_data_plane, folder, storage.address, "--listen", address, "--cores", cores,
            "--connections", str(connections), environment={"SHADOWSERVE_DPU_STORAGE_PASSWORD": password},
        )  # fmt: skip
        self._plane = stack.enter_context(ExitStack())
        self.restart_plane()
        keys = {
            "data_plane": address,
            "fetch_buffer_bytes": buffer_bytes,
            "store_buffer_bytes": buffer_bytes,
            "identity_cache": str(folder / "content.json"),
        }
        keys |= dict.fromkeys(("lookup_timeout_s", "fetch_timeout_s", "store_timeout_s"), _TIMEOUT_S / 2) | host
        held: dict[str, Any] = {"kv_cache_bytes": model.kv_bytes * (tokens + _ROUNDING_TOKENS)} if one_request else {}
        # A prompt is computed in one step, as in engines that only compute prompts.
        engine = started_engine(
            "engine", folder, partition.engine, model, load, 1, plugin(keys), step_tokens=load.prompt_tokens,
            **held,
        )  # fmt: skip
        self.engine: Engine = stack.enter_context(engine)
        self.plane = stack.enter_context(contextlib.closing(DataPlaneClient(address)))

    def restart_plane(self, *flags: str) -> None:
        """Start the data plane with more flags; stop the running one first."""
        self._plane.close()
        with self._network.client_side():
            self._plane.enter_context(self._start_plane(*flags))

    def ask(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Serve a prompt and return its result."""
        request = {"prompt": list(tokens), "tokens": len(tokens), "output": 1, "at": 0.0}
        (result,) = self.engine.call("serve", timeout_s=_TIMEOUT_S, requests=[request])
        found: dict[str, Any] = result
        return found

    def serve(self, tokens: Sequence[int], cached: int) -> dict[str, Any]:
        """Serve a prompt of which ``cached`` tokens are stored, and return its result.

        Raises:
            ShadowServeError: More or less was computed.
        """
        result = self.ask(tokens)
        if result["cached"] != cached:
            raise ShadowServeError(f"{result['cached']} tokens of {len(tokens)} were not computed, instead of {cached}")
        return result

    def bucket(self) -> dict[str, int]:
        """Return the store's INFO about its bucket."""
        with self._network.store_side():
            found: dict[str, int] = self._operator.info("s3")
        return found

    def chill(self) -> None:
        """Evict everything from the store's memory once it is in the bucket.

        Raises:
            ShadowServeError: It does not get there in time.
        """
        with self._network.store_side():
            written = lambda: self._operator.info("s3")["records"] >= self._chunks_stored  # noqa: E731
            until(written, "records are not in the bucket", _TIMEOUT_S)
            value = bytes(_FILL_BYTES)
            for _ in range(self._store_bytes // _FILL_BYTES + 2):
                self._operator.set(f"fill:{next(self._filled)}", value)

    def store(self, tokens: Sequence[int]) -> None:
        """Compute and store the chunks of a prompt."""
        self.engine.call("reading", only=False)
        self.serve(tokens, 0)
        self.engine.call("settle")
        self.engine.call("reading", only=True)
        self._chunks_stored += len(tokens) // DEFAULT_CHUNK_TOKENS


@click.command()
@shape_options(layers=24, hidden=256, heads=4, head_size=64)
@click.option(
    "--prompt", "prompts", default=("4096:8", "8192:16"), show_default=True, multiple=True, metavar="TOKENS:CHUNKS",
    help="Tokens of a prompt, and its stored chunks of 256 tokens; repeatable.",
)  # fmt: skip
@click.option(
    "--transfer", default=0.9, show_default=True, type=click.FloatRange(0.05, 20),
    help="Time of the link for the stored chunks, relative to the time to the first token without it.",
)  # fmt: skip
@click.option(
    "--connections", default=2, show_default=True, type=click.IntRange(1, 64),
    help="Connections from the data plane to the store.",
)  # fmt: skip
@click.option(
    "--s3/--no-s3", "over_s3", default=not MISSING, show_default="where Ceph is installed",
    help="Also measure a store that reads from a Ceph bucket.",
)  # fmt: skip
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1, 50), help="Number of pairs.")
@output_options
def layers(
    model: Model,
    prompts: tuple[str, ...],
    transfer: float,
    connections: int,
    over_s3: bool,
    repeats: int,
    output: Output,
) -> None:
    """Compare loading layer by layer with loading chunk by chunk.

    Store and engine are in two network namespaces, which needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN) and iproute2.
    """
    cases = [_case(text) for text in prompts]
    with Programs() as programs:
        network = programs.enter_context(linked())
        network.limit(_LOCAL_GBIT_PER_S)
        tokens = max(case.tokens for case in cases)
        bed = Bed(programs, programs.logs, network, model, tokens, connections, over_s3, layer_order=True)
        progress = programs.progress(len(cases) * (repeats + 1))
        for case in cases:
            _prepare(bed, network, case, transfer)
            progress("measuring")
            for number in range(repeats):
                _turn(bed, network, case, number)
                progress("measuring")
    _report(cases).finish(output)


def _case(text: str) -> _Case:
    tokens, _, chunks = text.partition(":")
    if not (tokens.isdigit() and chunks.isdigit()) or not 0 < int(chunks) * DEFAULT_CHUNK_TOKENS < int(tokens):
        raise click.BadParameter(f"{text!r} is not TOKENS:CHUNKS with fewer tokens in the chunks than there are")
    return _Case(int(tokens), int(chunks))


def _prepare(bed: Bed, network: Link, case: _Case, transfer: float) -> None:
    """Compute a prompt, store its prefix, and set the link's rate for it.

    Raises:
        ShadowServeError: The answer does not depend on the stored prefix, or differs with a cache.
    """
    network.limit(_LOCAL_GBIT_PER_S)
    bed.engine.call("reading", only=True)
    bed.serve(case.prompt, 0)
    answers = [bed.serve(case.prompt, 0) for _ in range(2)]
    case.ttft_s[_NO_CACHE] = [answer["ttft_s"] for answer in answers]
    other = prompt(case.tokens + 1, case.prefix_tokens, VOCABULARY) + case.prompt[case.prefix_tokens :]
    if bed.serve(other, 0)["answer"] == answers[0]["answer"]:
        raise ShadowServeError("the answer does not depend on the prefix: equal answers would show nothing")
    bed.store(case.prompt[: case.prefix_tokens])
    bed.engine.call("layerwise", on=True)
    before = bed.plane.statistics().fetched_bytes
    times = []
    for _ in range(2):
        result = bed.serve(case.prompt, case.prefix_tokens)
        times.append(result["ttft_s"])
        if result["answer"] != answers[0]["answer"]:
            raise ShadowServeError(f"{result['answer']} with a cache, {answers[0]['answer']} without")
    case.stored_bytes = (bed.plane.statistics().fetched_bytes - before) // len(times)
    case.gbit_per_s = max(case.stored_bytes * 8e-9 / (transfer * times[-1]) / _TCP_SHARE, 0.001)


def _turn(bed: Bed, network: Link, case: _Case, number: int) -> None:
    """Serve once with each system, in reverse order every second time."""
    answers = set()
    for name in bed.systems if number % 2 == 0 else reversed(bed.systems):
        system = _SYSTEMS[name]
        if system.cold:
            bed.chill()
        network.limit(case.gbit_per_s if system.over_link else _LOCAL_GBIT_PER_S)
        bed.engine.call("layerwise", on=system.layerwise)
        before = bed.bucket()
        result = bed.serve(case.prompt, case.prefix_tokens)
        read = bed.bucket().get("read_records", 0) - before.get("read_records", 0)
        if read != (case.chunks if system.cold else 0):
            raise ShadowServeError(f"{name}: {read} of {case.chunks} records came from the bucket")
        case.ttft_s[name].append(result["ttft_s"])
        answers.add(tuple(result["answer"]))
    if len(answers) > 1:
        raise ShadowServeError(f"the systems give different answers: {answers}")


def _report(cases: Sequence[_Case]) -> Report:
    report = Report(
        "layers", ["tokens", "stored", "system", "link_Gbit_per_s", "stored_MB", "ttft_ms"], bars=["ttft_ms"]
    )
    for case in cases:
        for name in [name for name in (*_SYSTEMS, _NO_CACHE) if case.ttft_s[name]]:
            times = case.ttft_s[name]
            over_link = name in _SYSTEMS and _SYSTEMS[name].over_link
            report.row(
                tokens=case.tokens, stored=case.prefix_tokens if name in _SYSTEMS else 0, system=name,
                link_Gbit_per_s=case.gbit_per_s if over_link else "", ttft_ms=statistics.median(times) * 1e3,
                stored_MB=case.stored_bytes / 1e6 if name in _SYSTEMS else "",
            )  # fmt: skip
    longest = max(cases, key=lambda case: case.tokens)
    for case in cases:
        suffix = "" if case is longest else f"_{case.tokens}"
        goals = ("at least 1.2", "at most 1.056") if case is longest else ("at least 1.2", "none; a shorter prompt")
        report.ratio(f"chunkwise_over_layerwise{suffix}", case.pairs(_CHUNKWISE, _LAYERWISE), goals[0])
        report.ratio(f"remote_over_local{suffix}", case.pairs(_LAYERWISE, _LOCAL), goals[1])
        if case.ttft_s[_S3]:
            report.ratio(f"s3_over_remote{suffix}", case.pairs(_S3, _LAYERWISE), "reported")
        local = case.pairs(_CHUNKWISE_LOCAL, _LOCAL)
        report.ratio(f"chunkwise_over_layerwise_local{suffix}", local, "none; without a link")
    return report

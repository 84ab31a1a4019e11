"""An engine that reads stored prompts, its data plane, and a store behind a link."""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from host_control.client import DataPlaneClient
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.bench.parts.serving import Host, Load, Model, check_depends, made_up, write_model
from shadowserve_tools.bench.parts.workload import client
from shadowserve_tools.bench.peers.buckets import BUCKET, CREDENTIALS, bucket_server
from shadowserve_tools.bench.peers.network import Link, linked
from shadowserve_tools.processes import Child, Programs, until
from shadowserve_tools.report import INTERVAL_VALUES_MIN, half_width, over

FREE_GBIT_PER_S: Final = 100.0
"""Rate of a link without a limit: more than the cores move."""
_TIMEOUT_S: Final = 120
_CONNECTIONS: Final = "2"
_RECONNECT_TIMEOUT_S: Final = 60.0
"""The plugin's circuit breaker may be open for a while."""
_FILL_BYTES: Final = 4 << 20
"""Size of a value that is no record, and so is stored in memory only."""
_ROUNDING_TOKENS: Final = 128
"""Tokens of a last block that is not full, and of vLLM's null block."""


class Bed:
    """The running programs.

    Args:
        over_s3: True for a bucket behind the store, of Ceph if it is installed.
        one_request: True for an engine that has blocks for a single request; others wait.
    """

    def __init__(
        self, programs: Programs, model: Model, tokens_max: int, over_s3: bool = False,
        one_request: bool = False, running_max: int = 1, **keys: Any,
    ) -> None:  # fmt: skip
        self.network: Link = programs.enter_context(linked())
        self.network.limit(FREE_GBIT_PER_S)
        load = Load.of_prompt(tokens_max, running_max=running_max)
        self._host = host = Host(programs, programs.logs, model, load, self.network)
        write_model(host.folder, model, load)
        self._store_bytes = 4 * host.document_bytes + (64 << 20)
        flags, environment = ["--memory-budget-bytes", str(self._store_bytes)], dict[str, str]()
        self.bucket_name = ""
        with self.network.store_side():
            if over_s3:
                endpoint, self.bucket_name = programs.enter_context(bucket_server(programs.logs))
                self.network.shape_server(urlsplit(endpoint).port or 80)
                self.network.limit_server(FREE_GBIT_PER_S)
                below = {"bucket": BUCKET, "endpoint": endpoint, "gather_s": 0.2, "timeout_s": _TIMEOUT_S / 2}
                flags, environment = [*flags, "--s3", json.dumps(below)], CREDENTIALS
            self._storage = host.start_storage(*flags, **environment)
            self._operator = programs.enter_context(client(self._storage.address, host.password))
        self._filled = itertools.count()
        self._chunks_stored = 0
        self._plane = programs.enter_context(ExitStack())
        plane = self.restart_plane()
        buffers = dict.fromkeys(("fetch_buffer_bytes", "store_buffer_bytes"), host.document_bytes)
        transfer = host.plugin(plane, **(buffers | keys))
        room: dict[str, Any] = (
            {"kv_cache_memory_bytes": model.kv_bytes * (load.tokens_max + _ROUNDING_TOKENS)} if one_request else {}
        )
        # A prompt is computed in one step, as in engines that only compute prompts.
        room["max_num_batched_tokens"] = load.prompt_tokens
        self.engine = host.start_engine("engine", transfer, **room)
        self.plane = programs.enter_context(closing(DataPlaneClient(plane.address)))

    def restart_plane(self, *flags: str) -> Child:
        self._plane.close()
        flags = ("--connections", _CONNECTIONS, *flags)
        self._daemon = self._host.start_plane(self._storage.address, *flags, stack=self._plane)
        return self._daemon

    def restart_tiers(self, warm: Sequence[int], **tiers: Any) -> None:
        """Restart the data plane with tiers, and wait until the engine fetches the stored prompt ``warm`` from it."""
        self.restart_plane("--tiers", json.dumps(tiers | {"scrub_bytes_per_s": 0}), "--shutdown-timeout-s", "60")
        until(
            lambda: self.engine.ask(list(warm), 1)["cached"] == held_tokens(len(warm)),
            "the engine fetched nothing from the restarted data plane", _RECONNECT_TIMEOUT_S,
        )  # fmt: skip

    def staging_bytes(self) -> int:
        """Return the resident bytes of registered memory in the data plane."""
        size, ours = 0, False
        for line in Path(f"/proc/{self._daemon.process.pid}/smaps").read_text().splitlines():
            name, _, value = line.partition(":")
            if "-" in name.split(" ")[0]:
                ours = "/shadowserve-" in line
            elif ours and name == "Rss":
                size += int(value.split()[0]) << 10
        return size

    def serve(self, tokens: Sequence[int], cached: int | None = None) -> dict[str, Any]:
        """Serve a prompt of which ``cached`` tokens are stored, and return its result."""
        return self.engine.ask(tokens, cached=cached, timeout_s=_TIMEOUT_S)

    def serve_computed(
        self, tokens: list[int], stored: int, output: int = 1, other_seed: int | None = None
    ) -> list[int]:
        """Compute a prompt of which ``stored`` tokens are to be stored, and return its answer."""
        self.engine.call("reading", only=True)
        seed = len(tokens) + 1 if other_seed is None else other_seed
        other = [*made_up(stored, seed), *tokens[stored:]]
        answer, others = (self.engine.ask(each, output, 0, timeout_s=_TIMEOUT_S)["answer"] for each in (tokens, other))
        check_depends(answer, others)
        return list(answer)

    def bucket(self) -> dict[str, int]:
        """Return the store's INFO about its bucket."""
        with self.network.store_side():
            found: dict[str, int] = self._operator.info("s3")
        return found

    def chill(self) -> None:
        """Evict everything from the store's memory once it is in the bucket."""
        until(lambda: self.bucket()["records"] >= self._chunks_stored, "records are not in the bucket", _TIMEOUT_S)
        with self.network.store_side():
            value = bytes(_FILL_BYTES)
            for _ in range(self._store_bytes // _FILL_BYTES + 2):
                self._operator.set(f"fill:{next(self._filled)}", value)

    def store(self, tokens: Sequence[int]) -> None:
        self.engine.call("reading", only=False)
        self.serve(tokens, 0)
        self.engine.call("settle")
        self.engine.call("reading", only=True)
        self._chunks_stored += len(tokens) // DEFAULT_CHUNK_TOKENS


@dataclass
class Cell:
    """A prompt from one place, and its times to the first token: two ways to serve it, and what a policy chooses.

    Attributes:
        ways: Names of the two ways and of the policy.
        chosen: Share that the policy served by the second way, of each time.
    """

    ways: Sequence[str]
    tokens: int
    gbit_per_s: float = FREE_GBIT_PER_S
    chosen: list[float] = field(default_factory=list)
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def better(self) -> str:
        """The faster one of the two ways."""
        return min(self.ways[:2], key=lambda name: statistics.median(self.ttft_s[name]))

    def over_better(self, name: str) -> list[float]:
        """Return the times of a way over those of the better one, by pairs."""
        return over(self.ttft_s[name], self.ttft_s[self.better])

    def row(self, *columns: str) -> dict[str, Any]:
        """Return the cell's row; ``columns`` are those of the median of each way, and of the mean of ``chosen``."""
        figures = [*(1e3 * statistics.median(self.ttft_s[name]) for name in self.ways), statistics.fmean(self.chosen)]
        ratios = self.over_better(self.ways[-1])
        width = half_width(ratios) if len(ratios) >= INTERVAL_VALUES_MIN else ""
        judged = {"over_better": statistics.median(ratios), "half_width": width}
        return {"tokens": self.tokens, **dict(zip(columns, figures, strict=True)), **judged}


def worst(cells: Iterable[Cell], name: str) -> list[float]:
    """Return the ratios of the cell in which a way is farthest behind the better one."""
    return max((cell.over_better(name) for cell in cells), key=statistics.median)


def held_tokens(tokens: int) -> int:
    """Return the tokens of a stored prompt that are fetched: whole chunks, without its last token."""
    return min(tokens // DEFAULT_CHUNK_TOKENS * DEFAULT_CHUNK_TOKENS, tokens - 1)

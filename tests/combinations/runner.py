"""Runs a pair of abilities with real vLLM, a real data plane and real storage behind it, and returns the result."""

import contextlib
import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
from abilities import ABILITIES, Behind, Expected
from cluster_support import PASSWORD, Cluster
from cold_support import CREDENTIALS
from engine import Engine
from faulty_s3 import BUCKET, faulty_s3
from machine import PATIENT, WAIT_MAX_S, free_port, wait_for
from stack import Process
from tiny_models import random_tokens
from transformers import AutoConfig

from shadowserve.calibration import KINDS, PRESETS, Calibration

_BUFFERS: Final = ("decompression", "dequantization", "dma-source", "store")
_SEVERAL_AT_ONCE: Final = tuple((random_tokens(300, seed), 110) for seed in range(11, 15))
"""Prompts and output lengths. Together their KV exceeds the paged memory of the ability ``preemption``."""
_ONE_BY_ONE: Final = tuple((random_tokens(tokens, seed), 8) for tokens, seed in ((700, 0), (513, 1)))
_DECODES: Final = (random_tokens(40, 3), 60)
"""A request that decodes during loads of other requests."""
_CHUNK: Final = 256


@dataclass
class Observed:
    """Observed result of a pair.

    Attributes:
        outcome: Outcome as in :class:`abilities.Expected`; ``wrong`` if an output differs or nothing was loaded.
        detail: Reasons of slower paths, text of a refusal, or the error.
    """

    outcome: str
    detail: str = ""

    def agrees(self, wanted: Expected) -> bool:
        """Return True if the result equals the expected one."""
        if wanted.outcome == "refused":
            return self.outcome == "refused" and re.search(wanted.detail, self.detail) is not None
        return (self.outcome, self.detail) == (wanted.outcome, wanted.detail)


class References:
    """Outputs of engines without a cache, by family, computed at the first request.

    Args:
        model: Function from a family to its model's folder.
        folder: Folder for calibrations.
    """

    def __init__(self, model: Callable[[str], Path], folder: Path) -> None:
        self.model = model
        self._folder = folder
        self._known: dict[str, dict[tuple[int, ...], list[int]]] = {}

    def calibration(self, family: str) -> Path:
        """Return a calibration of a family's model: as fine in every channel, as no real one is."""
        file = self._folder / f"{family}.calibration"
        if not file.exists():
            config = AutoConfig.from_pretrained(self.model(family))
            shape = (config.num_hidden_layers, KINDS, config.num_key_value_heads, config.head_dim)
            theta = config.rope_parameters.get("rope_theta", 10000.0)
            Calibration(
                family,
                config.architectures[0],
                json.dumps(config.rope_parameters),
                dict.fromkeys(PRESETS, np.full(shape, 0.05, np.float32)),
                np.zeros(shape, np.float32),
                theta ** -np.arange(0, 1, 2 / config.head_dim),
            ).write(file)
        return file

    def of(self, family: str) -> dict[tuple[int, ...], list[int]]:
        """Return the outputs of all prompts. A check has shown that another first chunk changes each output."""
        if family not in self._known:
            engine = Engine(self.model(family), None, enable_prefix_caching=False)
            try:
                known = {}
                for prompt, tokens in (*_ONE_BY_ONE, *_SEVERAL_AT_ONCE, _DECODES):
                    (known[tuple(prompt)],) = engine.outputs([prompt], tokens)
                chunked = [prompt for prompt, _ in (*_ONE_BY_ONE, *_SEVERAL_AT_ONCE)]
                engine.assert_sensitive(chunked, [known[tuple(prompt)][:8] for prompt in chunked])
            finally:
                engine.close()
            self._known[family] = known
        return self._known[family]


@dataclass
class _Setup:
    """Configuration of a pair."""

    names: tuple[str, ...]
    host: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    plane: list[str] = field(default_factory=list)
    behind: Behind = "node"
    family: str = "llama"

    @classmethod
    def of(cls, *names: str) -> "_Setup":
        setup = cls(names)
        for name in names:
            ability = ABILITIES[name]
            setup.host |= ability.host
            setup.engine |= ability.engine
            if ability.plane and ability.plane[0] not in setup.plane:
                setup.plane += ability.plane
            setup.family = ability.family or setup.family
        asked = [ABILITIES[name].behind for name in names]
        setup.behind = next((each for each in asked if each not in (None, "nothing")), None) or (
            "nothing" if "nothing" in asked else "node"
        )
        if {"groups", "preemption"} <= set(names):
            # Each group has its own blocks, and without vLLM's prefix cache windows have no hits.
            setup.engine |= {"num_gpu_blocks_override": 260, "enable_prefix_caching": True}
        return setup

    @property
    def exact(self) -> bool:
        """True if outputs equal those of an engine without a cache."""
        return all(ABILITIES[name].exact for name in self.names)


@contextlib.contextmanager
def _storage(behind: Behind, folder: Path) -> Iterator[tuple[list[str], Callable[[], None]]]:
    """Yield the data plane's flags for the storage, and a function that clears the storage's memory."""
    with contextlib.ExitStack() as ends:

        def node(*flags: str) -> Process:
            process = Process("storage", "--port", str(free_port()), "--memory-budget-bytes", "64MiB", *flags)
            ends.callback(process.stop)
            return process

        def nothing() -> None:
            """No-op: there is no memory to clear."""

        if behind == "nothing":
            yield ["--storage", ""], nothing
        elif behind == "node":
            yield ["--storage", node().address], nothing
        elif behind == "nodes":
            yield ["--storage-nodes", json.dumps([node().address for _ in range(2)])], nothing
        elif behind == "cluster":
            (folder / "cluster").mkdir()
            cluster = Cluster(folder / "cluster", replicas=0)
            ends.callback(cluster.kill)
            cluster.start()
            names = json.dumps([each.address for each in cluster.nodes])
            yield ["--storage-cluster", names, "--storage-password", PASSWORD], nothing
        else:
            server = ends.enter_context(faulty_s3())
            s3 = {"bucket": BUCKET, "endpoint": server.endpoint, "prefix": "pair", "gather_s": 0.2, "timeout_s": 20.0}
            ends.enter_context(mock.patch.dict(os.environ, CREDENTIALS))
            cold = node("--s3", json.dumps(s3))

            def restart() -> None:
                cold.stop()
                cold.restart()

            yield ["--storage", cold.address], restart


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_MAX_S) as answer:
        return str(answer.read().decode())


def _reasons(port: int) -> set[str]:
    """Return a data plane's counted reasons of slower paths."""
    found = re.findall(r'^shadowserve_slower_paths_total\{reason="(\w+)"\} [1-9]', _metrics(port), re.MULTILINE)
    return set(found)


def _differing(outputs: list[Any], known: Mapping[tuple[int, ...], list[int]]) -> str:
    for output in outputs:
        found, right = list(output.outputs[0].token_ids), known[tuple(output.prompt_token_ids)]
        if found != right:
            return f"the output of a prompt of {len(output.prompt_token_ids)} tokens is {found}; right is {right}"
    return ""


def _work(engine: Engine, setup: _Setup, known: Mapping[tuple[int, ...], list[int]], *, storing: bool) -> str:
    """Run prompts on an engine. Return the error, if any; the second run must load the prompts."""
    wrong = ""
    if "preemption" in setup.names:
        outputs = engine.generate([prompt for prompt, _ in _SEVERAL_AT_ONCE], _SEVERAL_AT_ONCE[0][1])
        wrong = _differing(outputs, known) if setup.exact else ""
    if "budget" in setup.names and not storing:
        prompts = [_DECODES[0], *(prompt for prompt, _ in _ONE_BY_ONE)]
        outputs = engine.generate(prompts, _DECODES[1])
        for output in outputs[1:]:
            del output.outputs[0].token_ids[_ONE_BY_ONE[0][1] :]
    else:
        outputs = [engine.generate([prompt], tokens)[0] for prompt, tokens in _ONE_BY_ONE]
    wrong = wrong or (_differing(outputs, known) if setup.exact or storing else "")
    if not storing and not wrong:
        counters = engine.counters()
        loaded, decided = counters.get("loaded_tokens", 0), sum(_of(counters, "decisions"))
        if loaded < _CHUNK and not ("policy" in setup.names and decided):
            wrong = f"{loaded} tokens were loaded"
    return wrong


def _run(setup: _Setup, address: str, references: References, forget: Callable[[], None]) -> tuple[str, set[str]]:
    """Store with one engine, and load with the same or a second one. Return the error and reasons of slower paths."""
    known = references.of(setup.family)
    model, reasons = references.model(setup.family), set[str]()

    def start(**host: Any) -> Engine:
        # Whether a load goes layer by layer must not depend on measured times.
        extra = {"computing_cache": "none", "layer_order": False, **setup.host, **host}
        if "calibration" in extra:
            extra["calibration"] = str(references.calibration(setup.family))
        engine = Engine(model, address, extra=extra, **setup.engine)
        if problem := engine.problem:
            engine.close()
            raise RefusedError(problem)
        return engine

    engine = start()
    try:
        wrong = _work(engine, setup, known, storing=True)
        engine.flush()
        forget()
        if "pd" in setup.names or setup.behind == "s3":  # with a measured compute rate the engine may recompute
            reasons |= _counted(engine)
            engine.close()
            engine = start(**({"pd_role": "decode"} if "pd" in setup.names else {}))
        engine.forget()
        wrong = wrong or _work(engine, setup, known, storing=False)
        reasons |= _counted(engine)
    finally:
        engine.close()
    return wrong, reasons


def _of(counters: Mapping[str, int], name: str) -> list[int]:
    """Return the values of a counter for all its reasons."""
    return [count for each, count in counters.items() if each.startswith(f"{name}/")]


def _counted(engine: Engine) -> set[str]:
    return {name.partition("/")[2] for name in engine.counters() if name.startswith("slower_paths/")}


class RefusedError(Exception):
    """The plugin is off. The text is the reason."""


def observe(first: str, second: str, folder: Path, references: References) -> Observed:
    """Run a pair and return the observed result."""
    setup = _Setup.of(first, second)
    port = free_port()
    flags = [f"--{name}-buffer-bytes=16MiB" for name in _BUFFERS]
    with _storage(setup.behind, folder) as (storage, forget):
        tiers = [flag.replace("DEVICE", str(folder / "device")) for flag in setup.plane]
        metrics = ("--metrics-port", str(port))
        plane = Process("dpu", "--listen", f"127.0.0.1:{free_port()}", *storage, *tiers, *flags, *metrics, *PATIENT)
        try:

            def empty() -> None:
                forget()
                if setup.behind != "nothing":
                    wait_for(lambda: re.search(r"^shadowserve_storage_up 1", _metrics(port), re.MULTILINE))

            wrong, reasons = _run(setup, plane.address, references, empty)
            reasons |= _reasons(port)
        except Exception as error:  # any type: vLLM wraps the plugin's exceptions
            return Observed("refused", _text(error))
        finally:
            plane.stop()
    if wrong:
        return Observed("wrong", wrong + (f" (slower paths: {', '.join(sorted(reasons))})" if reasons else ""))
    return Observed("slower", ", ".join(sorted(reasons))) if reasons else Observed("works")


def _text(error: BaseException) -> str:
    causes = []
    while error is not None and len(causes) < 8:
        causes.append(str(error))
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return " | ".join(causes)

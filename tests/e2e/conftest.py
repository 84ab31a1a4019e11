"""Fixtures for real vLLM engines in this process with one tiny model. No test needs a network."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("host", "models"))]

from engine import PATIENT, Engine  # noqa: E402
from family_fixture import family  # noqa: E402, F401
from kit import SEEDED  # noqa: E402
from machine import free_port, python_path  # noqa: E402
from preloaded import IMPORTED_BY_WORKERS  # noqa: E402
from scripted import ScriptedDataPlane  # noqa: E402
from stack import Process  # noqa: E402
from stack import data_plane as start_daemon  # noqa: E402
from tiny_models import CHUNK, random_tokens  # noqa: E402

OUTPUT = 8

PROMPTS = {
    **{(tokens, 0): OUTPUT for tokens in (31, 240, 256, 257, 300, 500, 512, 513, 700, 1000)},
    **{(600, seed): OUTPUT for seed in range(1, 6)},
    # One chunk ends in generated tokens.
    (200, 0): 150,
    # Together, they have too much KV for a small cache.
    **{(300, seed): 110 for seed in range(11, 15)},
}
"""Number of tokens that :func:`reference` generates, by arguments of :func:`prompt`. Prompts with the same seed are
prefixes of each other."""


@pytest.fixture(scope="session")
def patient() -> dict[str, float]:
    """Host configuration with long deadlines, for tests in which the data plane answers."""
    return PATIENT


@pytest.fixture(scope="session")
def model(family: Callable[[str], Path]) -> Path:  # noqa: F811
    """The model of most tests."""
    return family("llama")


@pytest.fixture(scope="session")
def make_engine(model: Path) -> Callable[..., Engine]:
    def make(data_plane: str | None, **options: Any) -> Engine:
        # Whether a load goes layer by layer must not depend on measured times.
        extra = {"computing_cache": "none", "layer_order": False} | options.pop("extra", {})
        return Engine(options.pop("model", model), data_plane, extra=extra, **options)

    return make


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    """Return a function (tokens, seed) -> prompt."""

    def make(tokens: int, seed: int = 0) -> list[int]:
        return random_tokens(tokens, seed)

    return make


@pytest.fixture(scope="session")
def plain_outputs(
    make_engine: Callable[..., Engine], prompt: Callable[..., list[int]]
) -> tuple[dict[tuple[int, ...], list[int]], dict[tuple[int, ...], list[int]]]:
    """Return the greedy and the seeded outputs of an engine without a cache, by prompt.

    A process can only have one engine at a time, and a start takes seconds. So this runs all prompts of all tests in
    advance. It also checks that a wrong first chunk would change each output.
    """
    with closing(make_engine(None, enable_prefix_caching=False)) as engine:
        prompts = {arguments: prompt(*arguments) for arguments in PROMPTS}
        known: dict[tuple[int, ...], list[int]] = {}
        for count in set(PROMPTS.values()):
            batch = [tokens for arguments, tokens in prompts.items() if PROMPTS[arguments] == count]
            known.update(zip(map(tuple, batch), engine.outputs(batch, count), strict=True))
        chunked = [tokens for tokens in prompts.values() if len(tokens) >= CHUNK]
        long = [tokens for tokens in chunked if len(tokens) in (700, 1000)]
        seeded = {tuple(tokens): engine.served(tokens, **SEEDED)[0] for tokens in long}
        engine.assert_sensitive(chunked, [known[tuple(tokens)][:OUTPUT] for tokens in chunked])
    return known, seeded


@pytest.fixture(scope="session")
def reference(plain_outputs: Any) -> Callable[..., list[list[int]]]:
    """Return a function (prompts, tokens) -> outputs of an engine without a cache."""

    def of(prompts: list[list[int]], tokens: int = 8) -> list[list[int]]:
        return [plain_outputs[0][tuple(prompt)][:tokens] for prompt in prompts]

    return of


@pytest.fixture(scope="session")
def serve(prompt: Callable[..., list[int]], reference: Callable[..., list[list[int]]]) -> Callable[..., int]:
    """Return a function that serves one prompt, checks its output, and returns the number of cached tokens."""

    def served(engine: Engine, length: int, seed: int = 0, tokens: int = OUTPUT) -> int:
        output, cached = engine.served(prompt(length, seed), tokens)
        assert output == reference([prompt(length, seed)], tokens)[0]
        return cached

    return served


@pytest.fixture(scope="session")
def seeded_reference(plain_outputs: Any) -> Callable[[list[int]], list[int]]:
    """Return a function prompt -> output of that engine with :data:`kit.SEEDED`."""
    return lambda prompt: list(plain_outputs[1][tuple(prompt)])


@pytest.fixture
def several_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of engines with several ranks from a process that has imported vLLM, which saves 11 s each."""
    import vllm.v1.executor.multiproc_executor as executor

    monkeypatch.setenv("PYTHONPATH", python_path())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([executor.__name__, *IMPORTED_BY_WORKERS, "tests.frozen_imports"])
    monkeypatch.setattr(executor, "get_mp_context", lambda: context)


def _scripted() -> Iterator[ScriptedDataPlane]:
    plane = ScriptedDataPlane()
    yield plane
    plane.stop()


data_plane = pytest.fixture(_scripted, name="data_plane")
plane = pytest.fixture(_scripted, scope="module", name="plane")
"""A scripted data plane for all tests of a file."""


@pytest.fixture(scope="module")
def storage() -> Iterator[Process]:
    """A real storage node."""
    process = Process("storage", "--port", str(free_port()))
    yield process
    process.stop()


@pytest.fixture(scope="module")
def daemon(storage: Process) -> Iterator[Process]:
    """A real data plane over the storage node."""
    process = start_daemon(storage.address)
    yield process
    process.stop()

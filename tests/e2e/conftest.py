"""Real vLLM engines in this process, sharing one tiny model; no test here needs a network."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("host", "models"))]

from engine import PATIENT, Engine  # noqa: E402
from scripted import ScriptedDataPlane  # noqa: E402
from tiny_models import CHUNK, random_tokens, write_model  # noqa: E402

OUTPUT = 8

PROMPTS = {
    **{(tokens, 0): OUTPUT for tokens in (31, 240, 256, 257, 300, 500, 512, 513, 700, 1000)},
    **{(600, seed): OUTPUT for seed in range(1, 6)},
    # A chunk ends in generated tokens.
    (200, 0): 150,
    # Too much KV for a small cache at once.
    **{(300, seed): 110 for seed in range(11, 15)},
}
"""Arguments of :func:`prompt` -> tokens that :func:`reference` generates. Prompts of one seed are prefixes of each
other."""
SEEDED = {"temperature": 1.0, "seed": 11}
"""How :func:`seeded_reference` samples."""


@pytest.fixture(scope="session")
def patient() -> dict[str, float]:
    """Return what the host is configured with where the data plane is meant to answer."""
    return PATIENT


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a tiny model of a family (see tiny_models.py)."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = write_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of


@pytest.fixture(scope="session")
def model(family: Callable[[str], Path]) -> Path:
    """Return the model that most tests share."""
    return family("llama")


@pytest.fixture(scope="session")
def make_engine(model: Path) -> Callable[..., Engine]:
    def make(data_plane: str | None, **options: Any) -> Engine:
        extra = {"computing_cache": "none"} | options.pop("extra", {})
        return Engine(options.pop("model", model), data_plane, extra=extra, **options)

    return make


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    """Return a function that makes prompts: the same arguments, the same tokens."""

    def make(tokens: int, seed: int = 0) -> list[int]:
        return random_tokens(tokens, seed)

    return make


@pytest.fixture(scope="session")
def plain_outputs(
    make_engine: Callable[..., Engine], prompt: Callable[..., list[int]]
) -> tuple[dict[tuple[int, ...], list[int]], dict[tuple[int, ...], list[int]]]:
    """Return the greedy outputs of an engine without any cache, and the seeded ones, by the prompt's tokens.

    Only one engine can live in a process, and starting one takes seconds, so the outputs of every prompt that the
    tests use are synthetic front; and for each that a hit can serve, it is shown that outputs tell.
    """
    engine = make_engine(None, enable_prefix_caching=False)
    try:
        prompts = {arguments: prompt(*arguments) for arguments in PROMPTS}
        known: dict[tuple[int, ...], list[int]] = {}
        for count in set(PROMPTS.values()):
            batch = [tokens for arguments, tokens in prompts.items() if PROMPTS[arguments] == count]
            known.update(zip(map(tuple, batch), engine.outputs(batch, count), strict=True))
        chunked = [tokens for tokens in prompts.values() if len(tokens) >= CHUNK]
        long = [tokens for tokens in chunked if len(tokens) in (700, 1000)]
        seeded = {tuple(tokens): list(engine.generate([tokens], **SEEDED)[0].outputs[0].token_ids) for tokens in long}
        engine.assert_sensitive(chunked, [known[tuple(tokens)][:OUTPUT] for tokens in chunked])
    finally:
        engine.close()
    return known, seeded


@pytest.fixture(scope="session")
def reference(plain_outputs: Any) -> Callable[..., list[list[int]]]:
    """Return a function that gives the outputs of an engine without any cache."""

    def of(prompts: list[list[int]], tokens: int = 8) -> list[list[int]]:
        return [plain_outputs[0][tuple(prompt)][:tokens] for prompt in prompts]

    return of


@pytest.fixture(scope="session")
def seeded_reference(plain_outputs: Any) -> Callable[[list[int]], list[int]]:
    """Return a function that gives what that engine samples for a prompt with :data:`SEEDED`."""
    return lambda prompt: list(plain_outputs[1][tuple(prompt)])


@pytest.fixture(scope="session")
def seeded() -> dict[str, Any]:
    """Return these sampling parameters."""
    return SEEDED


@pytest.fixture
def several_workers(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Have an engine's workers, processes of their own, forked from one that has imported vLLM: that takes 11 s."""
    import vllm.v1.executor.multiproc_executor as executor

    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            executor.__name__,
            "vllm.v1.worker.cpu_worker",
            "vllm.model_executor.models.llama",
            "host_control.vllm.connector",
        ]
    )
    monkeypatch.setattr(executor, "get_mp_context", lambda: context)


@pytest.fixture
def data_plane() -> Iterator[ScriptedDataPlane]:
    plane = ScriptedDataPlane()
    yield plane
    plane.stop()


@pytest.fixture(scope="module")
def plane() -> Iterator[ScriptedDataPlane]:
    """One for all tests of a file, as its engines are."""
    plane = ScriptedDataPlane()
    yield plane
    plane.stop()

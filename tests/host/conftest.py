"""Fixtures of the host's tests: a scripted data plane and its clients."""

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from machine import WAIT_MAX_S, wait_for

from shadowserve.chunk import ChunkLayout, DType, Quantizer

sys.path.insert(0, str(Path(__file__).parent))

from gpu_support import build_driver  # noqa: E402
from lookup_support import MODEL, NAMESPACES, leading_tokens  # noqa: E402
from manager_support import Kit  # noqa: E402
from scheduler_support import CHUNK, groups_of, handshake  # noqa: E402
from scripted import Clock, ScriptedDataPlane  # noqa: E402

from host_control.client import DataPlaneClient  # noqa: E402
from host_control.config import HostConfig  # noqa: E402
from host_control.lookup import PrefixLookup  # noqa: E402
from host_control.registered_memory import RegisteredMemory  # noqa: E402

CHUNK_TOKENS = 4
# test_layouts.py runs these tests in other processes: Triton is in its own folder, and compiles or interprets.
collect_ignore = ["test_triton_compiles.py"]
if not importlib.util.find_spec("triton"):
    collect_ignore += ["test_layouts_triton.py", "test_digest_triton.py"]


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the CUDA driver for machines without a GPU."""
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def plane() -> Iterator[ScriptedDataPlane]:
    plane = ScriptedDataPlane()
    yield plane
    plane.stop()


@pytest.fixture
def shape() -> ChunkLayout:
    return ChunkLayout(
        namespace=b"n" * 32,
        dtype=DType.FLOAT32,
        layers=2,
        kinds=2,
        vector_length=8,
        tokens=CHUNK_TOKENS,
        quantizer=Quantizer.LOSSLESS,
    )


@pytest.fixture
def client(plane: ScriptedDataPlane) -> Iterator[DataPlaneClient]:
    client = DataPlaneClient(plane.address, backoff=0.02, backoff_max_s=0.1, connect_timeout_s=WAIT_MAX_S)
    assert client.wait_ready(WAIT_MAX_S)
    yield client
    client.close()


@pytest.fixture
def registration(client: DataPlaneClient, shape: ChunkLayout) -> RegisteredMemory:
    return RegisteredMemory(client, [shape], 8 * shape.raw_bytes, connect_timeout_s=WAIT_MAX_S)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leftovers() -> Callable[..., set[str]]:
    """Return a function that lists a process's files in /dev/shm, by default this one's."""

    def names(process: int = os.getpid()) -> set[str]:
        return {path.name for path in Path("/dev/shm").glob(f"shadowserve-05e1f00d{process:08x}*")}

    assert names() == set()
    return names


@pytest.fixture
def wait() -> Callable[..., Any]:
    """Return a function that waits until a condition holds."""
    return wait_for


@pytest.fixture
def make_side(plane: ScriptedDataPlane) -> Iterator[Callable[..., Any]]:
    from host_control.vllm.scheduler_side import SchedulerSide

    sides = []

    def make(
        ranks: int = 1,
        fetch: bool = True,
        store: bool = True,
        groups: Any = None,
        recomputes: bool = True,
        quantized: bool = False,
        **config: Any,
    ) -> Any:
        groups = groups or groups_of()
        patient: dict[str, Any] = dict.fromkeys(("lookup_timeout_s", "connect_timeout_s"), WAIT_MAX_S)
        patient["computing_cache"] = "none"
        settings = HostConfig(data_plane=plane.address, chunk_tokens=CHUNK, **(patient | config))
        logger = logging.getLogger("test")
        side = SchedulerSide(
            settings, groups, fetch=fetch, store=store, problem="", logger=logger, recomputes=recomputes
        )
        side.start({rank: handshake(rank, groups, quantized=quantized) for rank in range(ranks)})
        sides.append(side)
        for client in side._clients:  # several attempts: an attempt to connect may fail on a slow machine
            assert client.wait_ready(WAIT_MAX_S)
        return side

    yield make
    for side in sides:
        side.close()


@pytest.fixture
def make_lookup(client: DataPlaneClient) -> Iterator[Callable[..., PrefixLookup]]:
    """Return a function that makes lookups of an engine with the shards of each group; by default one of two ranks."""
    made = []

    def make(*groups: Sequence[bytes], rule: Any = leading_tokens, **options: Any) -> PrefixLookup:
        held = [[(client, name) for name in names] for names in groups or [NAMESPACES]]
        made.append(PrefixLookup(MODEL, held, rule, **{"chunk_tokens": 4, "timeout": WAIT_MAX_S, **options}))
        return made[-1]

    yield make
    for lookup in made:
        lookup.close()


@pytest.fixture
def make_kit(client: DataPlaneClient, plane: ScriptedDataPlane, shape: ChunkLayout) -> Iterator[Callable[..., Kit]]:
    """Return a function that makes a manager, with room for ``chunks`` chunks of each shape."""
    kits = []

    def make(*shapes: ChunkLayout, chunks: float = 8, **options: Any) -> Kit:
        room = int(chunks * sum(each.raw_bytes for each in shapes or [shape]))
        kits.append(Kit(client, plane, shapes or [shape], room, **options))
        return kits[-1]

    yield make
    for kit in kits:
        kit.manager.close(WAIT_MAX_S)


@pytest.fixture
def kit(make_kit: Callable[..., Kit]) -> Kit:
    return make_kit()

"""Shared memory segments, and registered memory over them."""

import fcntl
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from machine import wait_for
from scripted import ScriptedDataPlane

from host_control import segment as module
from host_control.client import DataPlaneClient, MemoryMessage
from host_control.cuda import CudaError
from host_control.registered_memory import RegisteredMemory
from host_control.segment import Segment
from shadowserve.chunk import ChunkLayout
from shadowserve.errors import ConfigurationError, DataPlaneError

Leftovers = Callable[..., set[str]]


def test_pages_are_populated_in_advance() -> None:
    size = 16 << 20
    segment = Segment.create(size)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for begin in range(0, size, mmap.PAGESIZE):
        segment.memory[begin] = 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    segment.close()
    assert faults < size // mmap.PAGESIZE // 4, "each takes microseconds, in the engine's thread"


@pytest.fixture
def two(client: DataPlaneClient, shape: ChunkLayout) -> RegisteredMemory:
    """Memory for chunks of two shapes."""
    return RegisteredMemory(client, [shape, replace(shape, namespace=b"s" * 32, layers=1)], 1 << 16)


def test_memory_of_several_shapes_is_one_region_that_is_not_reused_once_it_is_retired(
    plane: ScriptedDataPlane, two: RegisteredMemory, leftovers: Leftovers
) -> None:
    first = two.acquire(5)
    view, first_id = first.memory[:16], two.memory_id
    assert leftovers() == set(), "it has no name any more"
    assert two.acquire(5) is first and plane.registrations == plane.calls.count("RegisterMemory") == 1
    two.retire(release=True, wait=True)
    assert two.current is None and plane.registrations == 0 and plane.calls.count("ReleaseMemory") == 1
    second = two.acquire(5)
    assert second is not first and two.memory_id != first_id
    second.memory[:16] = b"\1" * 16
    assert bytes(view) == bytes(16), "a view of retired memory is unchanged"
    two.close()
    assert plane.registrations == 0


def test_a_refused_registration_leaves_no_memory(
    client: DataPlaneClient,
    plane: ScriptedDataPlane,
    two: RegisteredMemory,
    leftovers: Leftovers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any, **named: Any) -> Any:
        raise DataPlaneError("as the test says", "refused")

    with monkeypatch.context() as patch:
        patch.setattr(client, "register", refused)
        with pytest.raises(DataPlaneError, match="as the test says"):
            two.acquire(5)
    assert two.current is None
    wait_for(lambda: plane.registrations == 0)
    assert leftovers() == set()
    two.acquire(5)
    assert plane.registrations == 1


class Borrowed(Segment):
    """Memory without a mapping of the data plane."""

    peer_keeps_mapping = False
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()


def test_memory_without_a_mapping_is_kept_until_its_release_is_answered(
    client: DataPlaneClient, plane: ScriptedDataPlane, shape: ChunkLayout
) -> None:
    """Otherwise late writes would hit memory that was allocated again."""
    memory = RegisteredMemory(client, [shape], 8 * shape.raw_bytes, make=Borrowed.create)
    first: Any = memory.acquire(5)
    plane.script.abort["ReleaseMemory"] = grpc.StatusCode.UNAVAILABLE
    memory.retire(release=True)
    assert not first.closed and memory.current is None
    with pytest.raises(DataPlaneError, match="does not answer the release of old memory"):
        memory.acquire(5)
    assert not first.closed, "closed before its release was answered"
    plane.script.abort.clear()
    second: Any = memory.acquire(5)
    assert first.closed and second is not first
    memory.retire(release=False)
    assert second.closed, "a restarted data plane does not know it"
    third: Any = memory.acquire(5)
    plane.script.abort["ReleaseMemory"] = grpc.StatusCode.UNAVAILABLE
    memory.close()
    assert not third.closed, "until the process ends"
    third.close()


class Undescribed(Segment):
    """Memory that its driver cannot describe to another process."""

    def message(self) -> MemoryMessage:
        raise CudaError("cuIpcGetMemHandle failed: not supported")


def test_memory_that_its_driver_cannot_describe_is_no_memory(client: DataPlaneClient, shape: ChunkLayout) -> None:
    """Otherwise the error ends the thread that fetches or stores."""
    memory = RegisteredMemory(client, [shape], 8 * shape.raw_bytes, make=Undescribed.create)
    with pytest.raises(DataPlaneError, match="cuIpcGetMemHandle") as error:
        memory.acquire(5)
    assert error.value.outcome == "no_memory" and memory.current is None


def test_chunks_in_memory_that_was_truncated_are_not_stored(
    registration: RegisteredMemory, plane: ScriptedDataPlane
) -> None:
    def fill(chunks: Any) -> None:
        os.ftruncate(registration.current._descriptor, 0)

    with pytest.raises(DataPlaneError, match="truncated the memory of stores") as error:
        registration.store(fill, [bytes(32)], [b""], time.monotonic() + 5)
    assert error.value.outcome == "no_memory" and registration.current is None and plane.stores == []


def test_without_a_data_plane_no_segment_is_created(shape: object, leftovers: Leftovers) -> None:
    client = DataPlaneClient("127.0.0.1:1", failures=1, backoff=9, backoff_max_s=9)
    try:
        registration = RegisteredMemory(client, [shape], 1 << 16, connect_timeout_s=0.1)
        with pytest.raises(DataPlaneError) as error:
            registration.acquire(1)
        assert error.value.outcome == "unreachable"
        with pytest.raises(DataPlaneError) as error:
            registration.acquire(1)
        assert error.value.outcome == "breaker_open"
        assert leftovers() == set()
    finally:
        client.close()


def test_too_little_shared_memory_is_an_error_with_advice(
    client: DataPlaneClient, shape: ChunkLayout, leftovers: Leftovers
) -> None:
    with pytest.raises(ConfigurationError, match="shm-size"):
        Segment.create(1 << 50)
    with pytest.raises(DataPlaneError, match="shm-size") as error:
        RegisteredMemory(client, [shape], 1 << 50).acquire(5)
    assert error.value.outcome == "no_memory"
    assert leftovers() == set()


def test_a_truncated_segment_reads_as_zeros_and_is_detected() -> None:
    segment = Segment.create(3 * 4096)
    segment.memory[:] = b"x" * segment.size
    view = segment.memory[4096:]
    assert segment.intact()
    os.ftruncate(segment._descriptor, 4096)
    assert not segment.intact(), "before the first access"
    assert bytes(view) == bytes(len(view))
    segment.close()
    assert not segment.intact()
    assert bytes(view) == bytes(len(view)), "a view outlives it"


def test_the_file_of_a_killed_process_is_removed(leftovers: Callable[..., set[str]]) -> None:
    program = "from host_control.segment import Segment; s = Segment.create(4096); print(s.name, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        name = process.stdout.readline().strip()
        Segment.create(4096).close()
        assert leftovers(process.pid) == {name}, "its owner still runs"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    Segment.create(4096).close()
    assert leftovers() == leftovers(process.pid) == set()


def test_a_segment_survives_a_concurrent_cleanup(monkeypatch: pytest.MonkeyPatch, leftovers: Leftovers) -> None:
    """The other process sees the file before it is locked, and removes it."""
    lock, looks = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not looks:
            looks.append(descriptor)
            module._remove_abandoned()  # like each process that creates a segment
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    segment = Segment.create(4096)
    try:
        assert leftovers() == {segment.name}, "the data plane could not open it"
    finally:
        segment.close()

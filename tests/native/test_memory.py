"""Memory that pipelines read and write: registered here, or exported by another process."""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from machine import NEVER_S

from shadowserve import native
from shadowserve.chunk import DType, Quantizer
from shadowserve.errors import NativeError
from shadowserve.native import MemoryKind, Result

MIB = 1 << 20
SLICE_BYTES = 65536
SLICES = 24

# Exports random bytes of a fixed seed, prints their place, and ends at a line of input.
EXPORTER = """
import sys
import numpy as np
from shadowserve import native
data = np.random.default_rng(7).integers(0, 32, int(sys.argv[1]), np.uint8)
with native.Export(data.ctypes.data, data.nbytes) as export:
    print(export.address, export.size, export.descriptor.hex(), flush=True)
    sys.stdin.readline()
    print("closed", flush=True)
"""


def make_pipeline(backend: str = "doca", **options: Any) -> native.Pipeline:
    sizes = {"decompression_bytes": MIB, "dequantization_bytes": MIB, "dma_source_bytes": MIB, "store_bytes": 8 * MIB}
    cores = {"dequantize_cores": [-1], "dma_cores": [-1]}
    return native.Pipeline(**({"backend": backend, "fused": False} | sizes | cores | options))


@pytest.fixture
def pipeline() -> Iterator[native.Pipeline]:
    with make_pipeline() as pipeline:
        yield pipeline


def test_backends_say_what_they_are() -> None:
    backends = native.backends()
    assert (backends["software"].description, backends["software"].emulated) == ("CPU", False)
    assert backends["software"].label == "software"
    assert backends["doca"].description.startswith("DOCA ")
    assert backends["doca"].emulated == backends["doca"].description.startswith("DOCA emulator ")
    assert backends["doca"].label == ("doca (emulated)" if backends["doca"].emulated else "doca")


def test_a_missing_device_is_named() -> None:
    with pytest.raises(NativeError, match="backend 'doca' on device 'mlx5_99'.*DOCA_ERROR_NOT_FOUND") as caught:
        make_pipeline(device="mlx5_99")
    assert caught.value.result is Result.NOT_SUPPORTED


def test_kinds_of_memory_by_backend(pipeline: native.Pipeline) -> None:
    assert pipeline.memory_kinds == {MemoryKind.LOCAL, MemoryKind.EXPORTED}
    assert pipeline.device
    with make_pipeline("software") as software:
        assert software.device == "" and MemoryKind.LOCAL in software.memory_kinds
        with pytest.raises(NativeError, match="registering 4096 bytes of exported memory") as caught:
            native.RegisteredMemory.exported(software, 1 << 40, 4096, b"nonsense")
        assert caught.value.result is Result.NOT_SUPPORTED


def test_a_region_lies_within_its_registered_memory(pipeline: native.Pipeline) -> None:
    memory = bytearray(4096)
    with native.RegisteredMemory.local(pipeline, memory) as registered:
        assert (registered.size, registered.kind) == (4096, MemoryKind.LOCAL)
        assert registered.region(96, 4000).length == 4000
        for offset, length in ((-1, 1), (0, 4097), (4096, 1), (1, -1)):
            with pytest.raises(NativeError, match="do not lie within 4096 bytes"):
                registered.region(offset, length)
        with pytest.raises(BufferError):
            memory.append(0)  # registration locks the size of the memory
    memory.append(0)
    registered.close()
    with pytest.raises(NativeError, match="closed"):
        registered.region(0, 1)
    with pytest.raises((BufferError, ValueError, TypeError)):
        native.RegisteredMemory.local(pipeline, bytes(4096))  # read-only


def stored(pipeline: native.Pipeline, memory: Any) -> tuple[Result, list[int]]:
    """Encode as one piece of many slices, without compression. Return the result and the slices' checksums."""
    pieces, slices = np.zeros(1, native.PIECE_DTYPE), np.zeros(SLICES, native.SLICE_DTYPE)
    pieces["codec"], pieces["slice_count"] = native.Codec.NONE, SLICES
    slices["memory_offset"] = np.arange(SLICES) * SLICE_BYTES
    slices["decoded_length"], slices["vectors"] = SLICE_BYTES, 16
    group = native.Group(
        quantizer=Quantizer.PASSTHROUGH, dtype=DType.UINT8, vector_length=SLICE_BYTES // 16, memory=memory
    )
    batch = native.Batch(pieces=pieces, slices=slices, groups=[group], deadline_ns=2**62)
    result = pipeline.encode(batch)
    batch.release()
    return result, [int(crc) for crc in slices["decoded_crc32"]]


def test_what_another_process_exported_is_collected_until_it_is_gone(pipeline: native.Pipeline) -> None:
    data = np.random.default_rng(7).integers(0, 32, SLICES * SLICE_BYTES, np.uint8)
    expected = [native.crc32(part) for part in data.reshape(SLICES, SLICE_BYTES)]
    command = [sys.executable, "-c", EXPORTER, str(data.nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as exporter:
        assert exporter.stdin is not None and exporter.stdout is not None
        address, size, descriptor = exporter.stdout.readline().split()
        exported = (int(address), int(size), bytes.fromhex(descriptor))
        with native.RegisteredMemory.exported(pipeline, *exported) as registered:
            assert registered.address == int(address)
            assert stored(pipeline, registered.region(0, registered.size)) == (Result.OK, expected)
            exporter.communicate("\n", timeout=NEVER_S)
            assert stored(pipeline, registered.region(0, registered.size))[0] is Result.DEVICE
    assert stored(pipeline, data) == (Result.OK, expected)  # memory of this process does not depend on the exporter


def test_a_descriptor_that_is_none_is_refused(pipeline: native.Pipeline) -> None:
    with pytest.raises(NativeError, match="doca_mmap_create_from_export") as caught:
        native.RegisteredMemory.exported(pipeline, 1 << 40, 4096, b"nonsense")
    assert caught.value.result is Result.BAD_ARGUMENT


def test_a_guarded_mapping_outlives_its_file_and_says_so(tmp_path: Any) -> None:
    size = 4 * mmap.PAGESIZE
    with open(tmp_path / "memory", "w+b") as file:
        file.truncate(size)
        whole = mmap.mmap(file.fileno(), size)
        other = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        guards = [native.Guard(whole), native.Guard(other)]
        whole[:] = b"x" * size
        assert not any(guard.lost for guard in guards)
        file.truncate(mmap.PAGESIZE)
        assert whole[mmap.PAGESIZE] == 0, "lost pages must read as zeros"
        assert [guard.lost for guard in guards] == [True, False]
        whole[-1:] = b"y"
        assert whole[0] == 0 and other[0] == ord("x"), "the whole mapping must be separate from the file"
        for guard in guards:
            guard.close()
            guard.close()
        assert guards[0].lost
        again = native.Guard(other)
        assert not again.lost, "a reused guard must start without a loss"
        again.close()


def test_a_guard_takes_whole_mappings() -> None:
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as memory, memoryview(memory) as view:
        for part in (view[8:], view[:0]):
            with pytest.raises(NativeError, match="guarding") as caught:
                native.Guard(part)
            assert caught.value.result is Result.BAD_ARGUMENT
            part.release()


UNGUARDED = """
import mmap, os, signal, sys, tempfile
from shadowserve import native
sent, order = sys.argv[1] == "sent", sys.argv[2]
def install():
    if order != "none":
        import faulthandler
        faulthandler.enable()
if order == "before":
    install()
file = tempfile.TemporaryFile()
file.truncate(mmap.PAGESIZE)
guarded, plain, other = (mmap.mmap(file.fileno(), mmap.PAGESIZE) for _ in range(3))
guard = native.Guard(guarded)
if order == "after":
    install()
another = native.Guard(other)  # takes the signal back
file.truncate(0)
assert guarded[0] == 0 and guard.lost and other[0] == 0 and another.lost
os.kill(os.getpid(), signal.SIGBUS) if sent else plain[0]
print("lives")
"""


@pytest.mark.parametrize("what", ["sent", "touched"])
@pytest.mark.parametrize("handler", ["none", "before", "after"])
def test_a_bus_error_elsewhere_still_ends_the_process(what: str, handler: str) -> None:
    command = [sys.executable, "-c", UNGUARDED, what, handler]
    # A loaded sanitizer would be the previous handler, and end the process in its own way.
    left_alone = {name: f"{os.environ.get(name, '')}:handle_sigbus=0" for name in ("ASAN_OPTIONS", "TSAN_OPTIONS")}
    done = subprocess.run(command, env=os.environ | left_alone, capture_output=True, text=True, timeout=NEVER_S)
    assert done.returncode == -signal.SIGBUS, done.stderr
    told = handler == "before" or (handler, what) == ("after", "touched")  # a sent signal goes to who was there before
    assert done.stdout == "" and done.stderr.count("Fatal Python error: Bus error") == told

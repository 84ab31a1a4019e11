"""shadowserve.native compared with the header: enums, structs, errors, loading, batches."""

import mmap
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from machine import NEVER_S

from shadowserve import native
from shadowserve._cffi import ffi
from shadowserve.chunk import DType, Quantizer
from shadowserve.errors import NativeError
from shadowserve.native import Isa, Result
from shadowserve.native._library import lib

REPOSITORY = Path(__file__).parents[2]
HEADER = "".join(path.read_text() for path in sorted((REPOSITORY / "native/include").glob("*.h")))


@pytest.mark.parametrize(
    ("enum", "prefix"),
    [
        (native.Result, "SS_"),
        (native.Codec, "SS_CODEC_"),
        (Quantizer, "SS_QUANTIZER_"),
        (DType, "SS_DTYPE_"),
        (native.Isa, "SS_ISA_"),
        (native.Stage, "SS_STAGE_"),
        (native.Origin, "SS_ORIGIN_"),
        (native.ColdState, "SS_COLD_"),
    ],
)
def test_enums_are_the_headers(enum: type[native.Result], prefix: str) -> None:
    names = {"Result": "result", "DType": "dtype", "ColdState": "cold_state"}
    name = "ss_" + names.get(enum.__name__, enum.__name__.lower())
    body = re.search(rf"enum {name} \{{(.*?)\}};", HEADER, re.DOTALL)
    assert body is not None
    declared = {key: int(value) for key, value in re.findall(r"(SS_\w+) = (\d+)", body[1])}
    declared.pop("SS_STAGE_COUNT", None)
    assert declared == {prefix + member.name: member.value for member in enum}


@pytest.mark.parametrize(
    ("dtype", "struct"),
    [
        (native.SLICE_DTYPE, "struct ss_slice"),
        (native.PIECE_DTYPE, "struct ss_piece"),
        (native.COLD_OBJECT_DTYPE, "struct ss_cold_object"),
        (native.COLD_ROW_DTYPE, "struct ss_cold_row"),
    ],
)
def test_numpy_dtypes_are_the_structs(dtype: np.dtype[np.void], struct: str) -> None:
    body = re.search(struct + r" \{(.*?)\};", HEADER, re.DOTALL)
    assert body is not None
    fields = re.findall(r"(\w+)(?:\[\d+\])?;", re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL))
    assert list(dtype.names or ()) == fields and dtype.itemsize == ffi.sizeof(struct)
    array = np.zeros(3, dtype)
    pointer = ffi.cast(struct + " *", array.ctypes.data)
    for number, field in enumerate(field for field in fields if dtype[field].kind != "S"):
        array[2][field] = 100 + number
        assert int(ffi.cast("uint64_t", getattr(pointer[2], field))) == 100 + number  # a pointer is one, too


def test_every_result_says_what_to_do() -> None:
    texts = {native.result_text(result) for result in Result}
    assert len(texts) == len(Result)
    assert all("; " in native.result_text(result) for result in Result if result is not Result.OK)


def test_the_core_counts_the_bytes_of_an_element_as_we_do() -> None:
    assert [dtype.itemsize for dtype in DType] == [lib.ss_dtype_size(dtype) for dtype in DType]


def test_an_isa_that_is_not_there_cannot_be_forced() -> None:
    missing = [isa for isa in Isa if not native.isa_available(isa)]
    assert missing, "no CPU has both AVX2 and NEON"
    before = native.isa_active()
    for isa in missing:
        with pytest.raises(NativeError) as caught:
            native.isa_force(isa)
        assert caught.value.result == Result.NOT_SUPPORTED and native.isa_active() is before


def import_native(**environment: str) -> subprocess.CompletedProcess[str]:
    """Import shadowserve.native in a separate process."""
    command = [sys.executable, "-c", "from shadowserve import native; print(native.library_path())"]
    return subprocess.run(
        command, env={**os.environ, **environment}, cwd=REPOSITORY, capture_output=True, text=True, timeout=NEVER_S
    )


def test_another_library_can_be_loaded(tmp_path: Path) -> None:
    other = tmp_path / "libother.so"
    other.write_bytes(Path(native.library_path()).read_bytes())
    beside = str(Path(native.library_path()).parent)  # where the DOCA emulator is
    result = import_native(SHADOWSERVE_NATIVE_LIBRARY=str(other), LD_LIBRARY_PATH=beside)
    assert result.returncode == 0 and result.stdout.strip() == str(other)


def test_a_library_of_another_abi_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("unsigned ss_abi_version(void) { return 999; }")
    other = tmp_path / "libother.so"
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", str(other), str(source)], check=True)
    result = import_native(SHADOWSERVE_NATIVE_LIBRARY=str(other))
    assert result.returncode != 0 and "has ABI version 999" in result.stderr and "make setup" in result.stderr


def test_only_the_api_is_exported() -> None:
    output = subprocess.run(
        ["nm", "-D", "--defined-only", native.library_path()], check=True, capture_output=True, text=True
    ).stdout
    exported = {line.split()[-1] for line in output.splitlines()}
    declared = set(re.findall(r"SS_API [^;(]*?(ss_\w+)\(", HEADER))
    assert exported == declared


def test_calls_release_the_gil() -> None:
    data = np.zeros(8 << 20, np.uint8)
    switches = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal switches
        while not stop.wait(0.0001):  # releases the GIL each time
            switches += 1

    # With an interval of a minute the GIL is not taken away: the counter runs only if this thread releases it.
    interval = sys.getswitchinterval()
    counter = threading.Thread(target=count)
    sys.setswitchinterval(60)
    try:
        counter.start()
        before = switches
        native.compress(native.Codec.DEFLATE, data)
        after = switches
    finally:
        stop.set()
        counter.join()
        sys.setswitchinterval(interval)
    assert after > before


def make_batch(memory: bytearray | bytes | mmap.mmap, **changes: object) -> native.Batch:
    """Return a batch with one empty piece."""
    group = native.Group(quantizer=Quantizer.LOSSLESS, dtype=DType.BFLOAT16, vector_length=64, memory=memory)
    arguments = {
        "pieces": np.zeros(1, native.PIECE_DTYPE),
        "slices": np.zeros(1, native.SLICE_DTYPE),
        "groups": [group],
        "deadline_ns": 1,
        **changes,
    }
    return native.Batch(**arguments)  # type: ignore[arg-type]


def test_a_batch_checks_whether_its_memory_is_writable() -> None:
    assert make_batch(bytearray(64)).writable
    assert not make_batch(bytes(64)).writable


def test_a_batch_holds_its_memory_until_released() -> None:
    memory = mmap.mmap(-1, 4096)
    batch = make_batch(memory)
    with pytest.raises(BufferError):
        memory.close()
    batch.release()
    batch.release()
    memory.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"pieces": np.zeros(1, native.SLICE_DTYPE)},
        {"slices": np.zeros(4, np.uint8)},
        {"slices": np.zeros(4, native.SLICE_DTYPE)[::2]},
        {"pieces": np.zeros((1, 1), native.PIECE_DTYPE)},
    ],
)
def test_a_batch_takes_only_its_own_arrays(changes: dict[str, object]) -> None:
    with pytest.raises(NativeError, match="_DTYPE") as caught:
        make_batch(bytearray(64), **changes)
    assert caught.value.result == Result.BAD_ARGUMENT


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(NativeError, match="'abacus'") as caught:
        native.Pipeline(backend="abacus", decompression_bytes=4096, store_bytes=4096)
    assert caught.value.result == Result.NOT_SUPPORTED


def test_a_pipeline_counts_and_closes() -> None:
    with native.Pipeline(decompression_bytes=4096, store_bytes=4096, pin_memory=False) as pipeline:
        assert set(pipeline.statistics()) == set(native.Stage)
        assert all(stage.items == 0 for stage in pipeline.statistics().values())
        assert pipeline.locked_bytes == 0
        with pytest.raises(NativeError, match="read-only"):
            pipeline.fetch(make_batch(bytes(64)), [])
    pipeline.close()
    with pytest.raises(NativeError, match="closed"):
        pipeline.statistics()

"""The shared library: loaded once, its constants, and the conversion of its result codes into exceptions."""

import abc
import enum
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self

import numpy as np

import shadowserve
from shadowserve.errors import NativeError, NotInstalledError

_BUILD: Final = "run 'make setup', or 'pip install -e .', in a checkout"

try:
    from shadowserve._cffi import ffi as ffi
except ImportError as error:
    raise NotInstalledError("the C core is not built: shadowserve/_cffi.py is missing", _BUILD) from error

if TYPE_CHECKING:
    from shadowserve._cffi import _Lib

ABI_VERSION: Final = 18


class Closing(abc.ABC):
    """Owner of an object of the C core until :meth:`close`, at the latest until the end of a ``with``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the object."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Owner(Closing):
    """Owner of an object of the C core, which the function ``destructor`` frees."""

    destructor: ClassVar[str]

    def __init__(self, struct: str, make: Callable[[Any], int], operation: str) -> None:
        """Let ``make`` store the object at the pointer that it gets; NativeError, of ``operation``, if it fails."""
        self._object: Any = ffi.NULL
        pointer = ffi.new(f"struct {struct} **")
        check(make(pointer), operation)
        self._object = pointer[0]

    def close(self) -> None:
        """Free the object. A second call does nothing; no other method may be called afterwards."""
        made, self._object = self._object, ffi.NULL
        if made != ffi.NULL:
            getattr(lib, self.destructor)(made)

    def __del__(self) -> None:
        if getattr(self, "_object", None) and lib is not None:
            self.close()


class Result(enum.IntEnum):
    """Result of a call into the C core, or of one chunk of a batch (``enum ss_result``)."""

    OK = 0
    BAD_DATA = 1
    NO_SPACE = 2
    BAD_ARGUMENT = 3
    NOT_SUPPORTED = 4
    NO_MEMORY = 5
    CHECKSUM = 6
    NOT_FINITE = 7
    NOT_FOUND = 8
    REFUSED = 9
    PROTOCOL = 10
    DISCONNECTED = 11
    DEADLINE = 12
    CANCELLED = 13
    SKIPPED = 14
    OS_ERROR = 15
    DEVICE = 16
    REDIRECTED = 17


class Codec(enum.IntEnum):
    """Entropy codecs (``enum ss_codec``)."""

    NONE = 0
    DEFLATE = 1
    LZ4 = 2
    ZSTD = 3
    KVRANS = 4


class Isa(enum.IntEnum):
    """Instruction sets of the kernels' variants (``enum ss_isa``)."""

    SCALAR = 0
    AVX2 = 1
    AVX512 = 2
    NEON = 3


class MemoryKind(enum.IntEnum):
    """Kind of the memory that batches deliver to or store from (``enum ss_memory_kind``)."""

    LOCAL = 0
    """Memory of this process."""
    EXPORTED = 1
    """Memory of another process, often on another machine, that exported it (:class:`shadowserve.native.Export`)."""
    CUDA_IPC = 2
    """Memory of a GPU of this machine, by a handle of CUDA IPC."""


class Origin(enum.IntEnum):
    """Source of the body of a piece, in a fetch (``enum ss_origin``)."""

    SERVER = 0
    """A server, or a node of a cluster."""
    MEMORY = 1
    """Memory of this process."""
    AWAITED = 2
    """Memory of this process, once its address is supplied."""
    NOWHERE = 3
    """None: it was awaited, and could not be read."""


class Stage(enum.IntEnum):
    """Stages of the pipeline (``enum ss_stage``)."""

    NET = 0
    DECOMPRESS = 1
    DEQUANTIZE = 2
    DMA = 3
    QUANTIZE = 4
    COMPRESS = 5
    PUT = 6


_DEVICE_TEXT_SIZE: Final = 256
_RESULT_TEXTS: Final[dict[Result, tuple[str, str]]] = {
    Result.BAD_DATA: ("the bytes do not decode to the length asked for", "treat the record as corrupt"),
    Result.NO_SPACE: ("the output buffer is too small", "make it ss_compress_bound() bytes long"),
    Result.BAD_ARGUMENT: ("sizes, offsets or options do not fit each other", "this is a bug in the caller: report it"),
    Result.NOT_SUPPORTED: (
        "this build or this CPU does not have it",
        "see 'shadowserve doctor', or install its library and rebuild",
    ),
    Result.NO_MEMORY: ("no memory", "make the configured buffers smaller"),
    Result.CHECKSUM: ("the bytes are not the ones that were checksummed", "treat the record as corrupt"),
    Result.NOT_FINITE: ("a value is infinite or NaN", "use the lossless quantizer for such data"),
    Result.NOT_FOUND: ("the server does not hold the key, or not that range", "treat it as a miss"),
    Result.REFUSED: ("the server answered an error", "see the server's text and its log"),
    Result.PROTOCOL: ("the server's answer is not what was asked for", "check that it is a Redis-compatible server"),
    Result.DISCONNECTED: ("the connection broke", "check that the storage server runs, and connect again"),
    Result.DEADLINE: ("the deadline passed", "allow more time, or look for an overloaded or stalled server"),
    Result.CANCELLED: ("it was cancelled", "nothing needs to be done"),
    Result.SKIPPED: ("an earlier chunk of the batch failed", "look at that chunk's result"),
    Result.OS_ERROR: ("a system call failed", "see the cause"),
    Result.DEVICE: (
        "the accelerator failed, also when asked again, or cannot reach the memory any more",
        "register the memory again; if that does not help, see 'shadowserve doctor' and the kernel's log",
    ),
    Result.REDIRECTED: (
        "another node of a cluster has it",
        "name the cluster's nodes in storage_cluster instead of one of them in storage",
    ),
}


def result_text(result: Result) -> str:
    """Return one sentence with the meaning of ``result`` and advice; ``"done"`` for ``Result.OK``."""
    if result is Result.OK:
        return "done"
    cause, advice = _RESULT_TEXTS[result]
    if result is Result.DEVICE and (text := device_error()):
        cause = f"{cause} (device: {text})"
    return f"{cause}; {advice}"


def device_error() -> str:
    """Return the last error of a device's library in this process; empty if there was none."""
    text = ffi.new("char[]", _DEVICE_TEXT_SIZE)
    lib.ss_device_error(text, _DEVICE_TEXT_SIZE)
    return ffi.string(text).decode("utf-8", "replace")


def check(code: int, operation: str, *, device: bool = False) -> None:
    """Raise NativeError unless ``code`` is ``Result.OK``; ``operation`` describes the failed operation.

    With ``device``, the message has the last error of the device's library.
    """
    if code == Result.OK:
        return
    result = Result(code)
    cause, advice = _RESULT_TEXTS[result]
    if result is Result.OS_ERROR:
        cause = f"{cause} ({os.strerror(ffi.errno)})"
    elif device and (text := device_error()):
        cause = f"{cause} (device: {text})"
    raise NativeError(f"{operation} failed: {cause}; {advice}", result)


def numpy_dtype(struct: str, bytes_kind: Literal["S", "u1"] = "S") -> "np.dtype[np.void]":
    """Return a struct as a numpy dtype: enums and pointers become integers; arrays of bytes, ``bytes_kind``."""
    fields = ffi.typeof(struct).fields
    formats = []
    for _, field in fields:
        size, name = ffi.sizeof(field.type), field.type.cname
        if field.type.kind == "array":
            formats.append(f"S{size}" if bytes_kind == "S" else f"{size}u1")
        else:
            formats.append(f"{'f' if name == 'double' else 'i' if name.startswith('int') else 'u'}{size}")
    offsets = [field.offset for _, field in fields]
    names = [name for name, _ in fields]
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": ffi.sizeof(struct)})


def library_path() -> str:
    """Return the path of the shared library that this process uses."""
    override = os.environ.get("SHADOWSERVE_NATIVE_LIBRARY")
    if override:
        return override
    # An editable install has parts of the package in the checkout and parts in site-packages.
    for directory in shadowserve.__path__:
        path = Path(directory, "libshadowserve.so")
        if path.exists():
            return str(path)
    raise NotInstalledError("the C core is not built: libshadowserve.so is missing", _BUILD)


def _load(path: str) -> "_Lib":
    """Load the library at ``path``, and check its ABI version."""
    try:
        loaded = ffi.dlopen(path)
    except OSError as error:  # built on a machine with more libraries
        absent = _absent_libraries(path)
        cause = f"{', '.join(absent)} cannot be found on this machine" if absent else str(error)
        packages = " ".join(dict.fromkeys(map(_debian_package, absent)))
        install = f"install what it needs (Debian, Ubuntu: apt-get install {packages}), or " if absent else ""
        remedy = f"{install}build it here: 'pip install .' in a checkout"
        raise NotInstalledError(f"the C core cannot be loaded: {cause}", remedy) from error
    version = loaded.ss_abi_version()
    if version != ABI_VERSION:
        raise NotInstalledError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}", _BUILD)
    return loaded


def _absent_libraries(path: str) -> list[str]:
    """Return the names of all shared libraries that the library at ``path`` needs and the loader does not find."""
    try:  # the loader's own message names only the first one
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^\s*(\S+) => not found", listed, re.MULTILINE)


def _debian_package(library: str) -> str:
    """Return the package of a shared library by Debian's rule: name and version, with a dash between two digits."""
    name, _, version = library.partition(".so.")
    if name == "libcrypto":
        name = "libssl"
    return f"{name}-{version}" if name[-1].isdigit() else f"{name}{version}"


lib = _load(library_path())

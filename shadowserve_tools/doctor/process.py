"""This process and what it stands on: interpreter, C core, limits, the engine."""

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from typing import Final

from shadowserve.errors import NotInstalledError
from shadowserve_tools.doctor.finding import Finding

TESTED_VLLM: Final = ("0.32.0", "0.33.0")


def interpreter() -> Iterator[Finding]:
    """Python and the operating system."""
    sound = sys.version_info >= (3, 11)
    yield Finding.of("Python", sound, platform.python_version(), "use 3.11 or newer", "failed")
    yield Finding.of("system", sys.platform == "linux", platform.platform(), "Linux is needed", "failed")


def native_core() -> Iterator[Finding]:
    """The C core and the codecs that it was built with."""
    try:
        from shadowserve import native
    except NotInstalledError as error:
        yield Finding("C core", "failed", error.missing, error.remedy)
        return
    yield Finding("C core", "ok", f"kernels use {native.isa_active().name.lower()}")


def decoding() -> Iterator[Finding]:
    """Check the codecs, TLS and backends of the C core."""
    try:
        from shadowserve import native
    except NotInstalledError:
        return  # native_core() reports it
    implementations = native.codec_implementations()
    for codec in native.Codec:
        implementation = implementations.get(codec)
        if implementation is None:
            package = f"lib{codec.name.lower()}'s development package"
            remedy = f"install {package}, then 'make setup': such records are misses now"
            yield Finding(f"codec {codec.name.lower()}", "warning", "not built in", remedy)
        elif codec is native.Codec.DEFLATE and "isa-l" not in implementation.lower():
            remedy = "install libisal-dev, then 'make setup': it decodes 2-3 times as fast"
            yield Finding("codec deflate", "warning", implementation, remedy)
        else:
            yield Finding(f"codec {codec.name.lower()}", "ok", implementation)
    library = native.tls_library()
    remedy = "install libssl-dev, then 'make setup', to encrypt the way to storage (storage_tls_ca)"
    yield Finding.of("TLS to storage", bool(library), library or "not built in", remedy)
    for backend in native.backends().values():
        imitation = "; it decodes and copies on CPU cores: for trying and testing, no DPU takes part"
        found = backend.description + (imitation if backend.emulated else "")
        yield Finding(f"backend {backend.label}", "ok", found)


def locked_memory() -> Iterator[Finding]:
    """How much a process may lock in memory."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY or os.geteuid() == 0
    found = "unlimited" if unlimited else f"{soft >> 20} MiB may be locked"
    enough = unlimited or soft >= 1 << 30
    yield Finding.of("locked memory", enough, found, "raise it (ulimit -l): buffers may be swapped out")


def shared_memory() -> Iterator[Finding]:
    """Check the space for the shared memory of engines and data plane."""
    shm = shutil.disk_usage("/dev/shm")
    enough = shm.free >= 512 << 20
    remedy = "enlarge /dev/shm (containers: --shm-size=1g)"
    yield Finding.of("shared memory", enough, f"{shm.free >> 20} MiB free in /dev/shm", remedy, "failed")


def cores() -> Iterator[Finding]:
    """The cores that this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    remedy = "data plane and engine will share cores: fine for trying, not for serving (docs/guides/cores.md)"
    yield Finding.of("cores", len(usable) >= 4, f"{len(usable)} usable: {usable}", remedy)


def engine() -> Iterator[Finding]:
    """vLLM, and whether it knows the plugin."""
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        remedy = "required in the serving process only: 'make setup' installs it"
        yield Finding("vLLM", "warning", "not installed", remedy)
        return
    tested = version.split("+")[0] in TESTED_VLLM
    remedy = f"tested with {' and '.join(TESTED_VLLM)}; run the tests with this version first"
    yield Finding.of("vLLM", tested, version, remedy)
    plugins = {entry.name for entry in importlib.metadata.entry_points(group="vllm.general_plugins")}
    found = f"vllm.general_plugins: {sorted(plugins)}"
    yield Finding.of("plugin", "shadowserve" in plugins, found, "pip install shadowserve", "failed")
    if importlib.util.find_spec("torchvision") and "+cpu" in version:
        remedy = "a CUDA build of it breaks vLLM's CPU build: pip uninstall torchvision"
        yield Finding("torchvision", "warning", "installed", remedy)

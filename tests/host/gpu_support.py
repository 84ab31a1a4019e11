"""A GPU for machines without one: the fake driver of native/tests/fake_cuda.c, and tensors over its memory."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from machine import NEVER_S

from host_control.cuda import DeviceBuffer, Driver
from host_control.delivery import Gpu

SOURCE = Path(__file__).parents[2] / "native" / "tests" / "fake_cuda.c"


def build_driver(folder: Path) -> Path:
    """Compile the fake driver and return it; its folder on ``LD_LIBRARY_PATH`` has other processes find it, too."""
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    library = folder / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(library)], check=True, timeout=NEVER_S
    )
    return library


def tensor(buffer: DeviceBuffer) -> Any:
    """Return a CPU tensor over the fake GPU's memory, which holds on to it, as a CUDA tensor does."""
    memory = (ctypes.c_uint8 * buffer.size).from_address(buffer.address)
    memory.buffer = buffer  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def fake_gpu(library: Path) -> Gpu:
    """Return the fake driver's first GPU."""
    return Gpu(Driver(str(library)).device(0), tensor)

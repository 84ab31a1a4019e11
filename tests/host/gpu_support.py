"""The GPU of the tests: the fake driver's (native/tests/fake_cuda.c), or a real one with ``TEST_GPU=1``.

scripts/gpu-check runs the tests of deliveries on a real GPU, except tests that need the fake driver, such as failures
on request.
"""

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

REAL = os.environ.get("TEST_GPU") == "1"
DEVICE = torch.device("cuda", 0) if REAL else torch.device("cpu")
"""Device of paged memory. The fake driver's GPU memory is host memory."""
SOURCE = Path(__file__).parents[2] / "native" / "tests" / "fake_cuda.c"


def build_driver(folder: Path) -> Path:
    """Compile the fake driver and return its path. Other processes find it with its folder in ``LD_LIBRARY_PATH``."""
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    library = folder / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(library)], check=True, timeout=NEVER_S
    )
    return library


def tensor(buffer: DeviceBuffer) -> Any:
    """Return a CPU tensor over the fake GPU's memory that keeps it allocated, like a CUDA tensor."""
    memory = (ctypes.c_uint8 * buffer.size).from_address(buffer.address)
    memory.buffer = buffer
    return torch.frombuffer(memory, dtype=torch.uint8)


def first_gpu(library: Path) -> Gpu:
    """Return the first GPU of the driver ``library``, or the real one."""
    return Gpu(Driver().device(0)) if REAL else Gpu(Driver(str(library)).device(0), tensor)

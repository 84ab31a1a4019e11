"""Fixtures of the C core's tests: this machine's instruction sets, and builds of the core by CMake.

It also makes ``builds`` and ``kvrans_reader`` importable: pytest imports by path, so folders need no __init__.py.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shadowserve import native

sys.path.insert(0, str(Path(__file__).parent))

from builds import REPOSITORY, NativeBuild  # noqa: E402

ISAS = [isa for isa in native.Isa if native.isa_available(isa)]


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[native.Isa]:
    """Run the test once for each instruction set, and restore the default."""
    before = native.isa_active()
    native.isa_force(request.param)
    yield request.param
    native.isa_force(before)


@pytest.fixture
def native_build() -> Callable[[str], NativeBuild]:
    """Build the C core: ``native_build(name)``."""
    return NativeBuild


@pytest.fixture
def arm_tools() -> None:
    """Skip the test if this machine cannot build for 64-bit Arm, or cannot run such programs."""
    missing = [tool for tool in ("aarch64-linux-gnu-gcc", "qemu-aarch64") if shutil.which(tool) is None]
    libraries = REPOSITORY / "build/aarch64/libraries"
    if missing or not any(libraries.glob(".unpacked-*")):
        pytest.skip(
            "needs aarch64-linux-gnu-gcc, qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, "
            f"qemu-user) and what 'scripts/unpack-arm64 {libraries.relative_to(REPOSITORY)}' unpacks"
        )


@pytest.fixture
def arm_build(arm_tools: None, native_build: Callable[[str], NativeBuild]) -> Callable[[], NativeBuild]:
    """Create the warning-free build for 64-bit Arm, whose programs run under qemu."""
    return lambda: native_build("aarch64")

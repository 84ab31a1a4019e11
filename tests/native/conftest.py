"""Fixtures of the C core's tests: which ISAs this machine has, and builds of the core by CMake.

Also makes ``kvrans_reader`` importable: pytest imports by path, so that folders need no __init__.py.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shadowserve import native

sys.path.insert(0, str(Path(__file__).parent))

REPOSITORY = Path(__file__).parents[2]
ISAS = [isa for isa in native.Isa if native.isa_available(isa)]


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name.lower())
def isa(request: pytest.FixtureRequest) -> Iterator[native.Isa]:
    """Run the test once for each instruction set, and put the default back."""
    before = native.isa_active()
    native.isa_force(request.param)
    yield request.param
    native.isa_force(before)


class NativeBuild:
    """A configured build of the C core under ``build/``, kept between runs so that only changes are compiled."""

    def __init__(self, name: str, options: dict[str, str], compiler: str | None = None) -> None:
        self.directory = REPOSITORY / "build" / "tests" / name
        self.environment = dict(os.environ)
        # The tests of a sanitizer build are programs of their own: what this process preloads is not for them.
        self.environment.pop("LD_PRELOAD", None)
        # CMake and Ninja came with this interpreter's environment, which need not be the active one.
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if compiler is not None:
            self.environment["CC"] = compiler
        generator = ["-G", "Ninja"] if shutil.which("ninja", path=self.environment["PATH"]) else []
        defines = [f"-D{key}={value}" for key, value in options.items()]
        self.run(self._tool("cmake"), "-S", str(REPOSITORY), "-B", str(self.directory), *generator, *defines)
        self.run(self._tool("cmake"), "--build", str(self.directory), "--parallel", "2")

    def _tool(self, name: str) -> str:
        """Return the program's path: a child's search path does not count when it is looked up."""
        return shutil.which(name, path=self.environment["PATH"]) or name

    def run(self, *command: str) -> str:
        """Run a command and return what it printed; fail the test with that where it fails."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=840)
        output = result.stdout + result.stderr
        assert result.returncode == 0, f"{' '.join(command)} exited with {result.returncode}:\n{output[-8000:]}"
        return output

    def ctest(self, *arguments: str) -> str:
        """Run CTest in the build."""
        return self.run(self._tool("ctest"), "--test-dir", str(self.directory), "--output-on-failure", *arguments)


@pytest.fixture
def native_build() -> Callable[..., NativeBuild]:
    """Make builds of the C core: ``native_build(name, options, compiler=None)``."""
    return NativeBuild


@pytest.fixture
def arm_tools() -> None:
    """Skip the test where there is nothing to build for 64-bit Arm with, or to run that."""
    missing = [tool for tool in ("aarch64-linux-gnu-gcc", "qemu-aarch64") if shutil.which(tool) is None]
    libraries = REPOSITORY / "build/aarch64/libraries"
    if missing or not any(libraries.glob(".unpacked-*")):
        pytest.skip(
            "needs aarch64-linux-gnu-gcc, qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, "
            f"qemu-user) and what 'scripts/unpack-arm64 {libraries.relative_to(REPOSITORY)}' unpacks"
        )


@pytest.fixture
def arm_build(arm_tools: None) -> Callable[..., NativeBuild]:
    """Make warning-free builds for 64-bit Arm, whose programs run under qemu: ``arm_build(compiler=None)``."""

    def build(compiler: str | None = None) -> NativeBuild:
        options = {
            "CMAKE_TOOLCHAIN_FILE": str(REPOSITORY / "native/toolchain-aarch64.cmake"),
            "CMAKE_COMPILE_WARNING_AS_ERROR": "ON",
            "SHADOWSERVE_TESTS": "ON",
            "SHADOWSERVE_BENCH": "ON",
        }
        return NativeBuild(f"aarch64-{compiler or 'gcc'}", options, compiler)

    return build

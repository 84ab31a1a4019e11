"""Builds of the C core by CMake: their names, their configuration, and their tests.

The builds are kept under ``build/tests``. If several processes need one at the same time, the first one builds it, and
the others wait.
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

REPOSITORY: Final = Path(__file__).parents[2]
FOLDER: Final = REPOSITORY / "build" / "tests"


class Options(NamedTuple):
    """Configuration of a build: CMake definitions, and tests to run (CTest's arguments)."""

    defines: dict[str, str]
    ctest: tuple[str, ...] = ()
    compiler: str | None = None


# For builds that are neither measured nor have the sanitizers' own level.
_QUICKLY: Final = {"CMAKE_C_FLAGS_RELEASE": "-O1 -DNDEBUG"}
# Undefined behaviour is a trap, not a call that prints it: clang compiles in three quarters of the time. libFuzzer
# prints the stack and writes the input.
_TRAPPING: Final = {"CMAKE_C_FLAGS": "-fsanitize-trap=undefined"}


def _of_one_decoder(decoder: str) -> Options:
    absent = dict.fromkeys(("SHADOWSERVE_LZ4", "SHADOWSERVE_ZSTD", "SHADOWSERVE_URING"), "OFF")
    names = "codec crc32 huffman_deflate doca_emulator_tasks block block_driver block_schedule".split()
    defines = {"SHADOWSERVE_TESTS": "ON", "SHADOWSERVE_DEFLATE": decoder, **absent, **_QUICKLY}
    return Options(defines, ("--verbose", "--tests-regex", f"^test_({'|'.join(names)})$"))


# Tests below the pipeline: their code is in the library of the data plane's tests, and here with sanitizers.
_BELOW_PIPELINE: Final = ("--exclude-regex", "^test_(pipeline|doca_emulator)_")
# Tests with threads, each path once. Of the pipeline over an accelerator, only a fetch, and hanging jobs.
_THREADED: Final = (
    "--tests-regex",
    r"^test_(codec|cold|block.*|pipeline_.*|doca_emulator_.*)$",
    "--exclude-regex",
    r"^test_pipeline_(counts|doca|pieces|trace|(failure|layers|pieces|sources|store|trace)\.doca)$",
)
# Code with its own variants for Arm, code on top of it, and a pipeline that stores and fetches.
_OF_ARM: Final = (
    "--tests-regex",
    "^test_(block|codec|cpu|crc32|decode|kvrans|kvrans_kernels|object|pipeline_(fetch|resp|store)|quantize|strided)$",
)
_ARM: Final = {
    "CMAKE_TOOLCHAIN_FILE": str(REPOSITORY / "native/toolchain-aarch64.cmake"),
    "CMAKE_COMPILE_WARNING_AS_ERROR": "ON",
    "SHADOWSERVE_TESTS": "ON",
    # BlueField-2's CPU has neither Armv8.1's atomics nor fp16 arithmetic nor dot products. Any such instruction, of the
    # compiler or of the source, ends the program with SIGILL.
    "SHADOWSERVE_ARM64_CPU": "cortex-a72",
}
BUILDS: Final = {
    "plain": Options({"SHADOWSERVE_TESTS": "ON"}, _BELOW_PIPELINE),
    "sanitized": Options({"SHADOWSERVE_TESTS": "ON", "SHADOWSERVE_SANITIZE": "address,undefined"}),
    "threads": Options({"SHADOWSERVE_TESTS": "ON", "SHADOWSERVE_SANITIZE": "thread"}, _THREADED),
    "libdeflate": _of_one_decoder("libdeflate"),
    "zlib": _of_one_decoder("zlib"),
    "fuzz": Options({"SHADOWSERVE_FUZZ": "ON", **_TRAPPING}, compiler="clang"),
    "aarch64": Options(_ARM, _OF_ARM),
}


class NativeBuild:
    """A build of the C core under ``build/``, kept between runs so that only changes are compiled."""

    def __init__(self, name: str) -> None:
        self.directory = FOLDER / name
        self._options = options = BUILDS[name]
        # The share of the cores for this process, if tests run in several processes.
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self._at_once = str(max(1, len(os.sched_getaffinity(0)) // workers))
        self.environment = dict(os.environ)
        # The tests of a sanitizer build are separate programs: preloaded libraries of this process are not for them.
        self.environment.pop("LD_PRELOAD", None)
        self.environment["SHADOWSERVE_TEST_BRIEF"] = "1"  # native/tests/check.h
        # CMake and Ninja belong to this interpreter's environment, which need not be the active one.
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if options.compiler is not None:
            self.environment["CC"] = options.compiler
        generator = ["-G", "Ninja"] if shutil.which("ninja", path=self.environment["PATH"]) else []
        defines = [f"-D{key}={value}" for key, value in options.defines.items()]
        with self._alone():
            self.run(self._tool("cmake"), "-S", str(REPOSITORY), "-B", str(self.directory), *generator, *defines)
            build = (self._tool("cmake"), "--build", str(self.directory), "--parallel", self._at_once)
            self.run(*build, "--target", *self._programs())

    def _tool(self, name: str) -> str:
        """Return the program's path: the lookup does not use a child's search path."""
        return shutil.which(name, path=self.environment["PATH"]) or name

    def _programs(self) -> list[str]:
        """Return the programs of the tests that run: ``NAME.VARIANT`` runs ``NAME``."""
        command = (self._tool("ctest"), "--test-dir", str(self.directory), "--show-only")
        listed = re.findall(r"Test +#\d+: (\w+)", self.run(*command, *self._options.ctest))
        return sorted(set(listed))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Prevent parallel builds by other processes, at most until the end of the process."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        with open(FOLDER / f"{self.directory.name}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def run(self, *command: str) -> str:
        """Run a command and return its output. Fail the test with the output if the command fails."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=1700)
        output = result.stdout + result.stderr
        assert result.returncode == 0, f"{' '.join(command)} exited with {result.returncode}:\n{output[-8000:]}"
        return output

    def ctest(self) -> str:
        """Run the build's tests. Return CTest's output."""
        command = (self._tool("ctest"), "--test-dir", str(self.directory), "--output-on-failure")
        at_once = str(max(2, int(self._at_once)))  # the pipeline's tests wait half of the time
        return self.run(*command, "--parallel", at_once, *self._options.ctest)

"""Builds of the C core by CMake: what they are called, how they are configured, which of their tests run.

All of it together takes minutes of a core, and the tests that come before them seldom use both. So a process of its own
(``python builds.py NAME...``) goes ahead of the tests at a low priority: it makes the builds and runs their tests while
other tests run. The first test that wants a build ends it, and does what is missing: it is only ever early.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

REPOSITORY: Final = Path(__file__).parents[2]
FOLDER: Final = REPOSITORY / "build" / "tests"


class Options(NamedTuple):
    """How a build is configured, and CTest's arguments: which of its tests run."""

    defines: dict[str, str]
    ctest: tuple[str, ...] = ()
    compiler: str | None = None


def _of_one_decoder(decoder: str) -> Options:
    absent = dict.fromkeys(("SHADOWSERVE_LZ4", "SHADOWSERVE_ZSTD", "SHADOWSERVE_URING"), "OFF")
    tests = "^test_(codec|crc32|huffman_deflate|doca_emulator_compress|block.*)$"
    defines = {"SHADOWSERVE_TESTS": "ON", "SHADOWSERVE_DEFLATE": decoder, **absent}
    return Options(defines, ("--verbose", "--tests-regex", tests))


# A fault at each task of a fetch and a store: some 700 pipelines. 'make test-dpu' runs them with the thread sanitizer.
_WITHOUT_FAULT_SWEEP: Final = ("--exclude-regex", "^test_pipeline_doca$")
_THREADED: Final = ("--tests-regex", "^test_(codec|block.*|pipeline_.*|doca_emulator_.*)$")
_ARM: Final = {
    "CMAKE_TOOLCHAIN_FILE": str(REPOSITORY / "native/toolchain-aarch64.cmake"),
    "CMAKE_COMPILE_WARNING_AS_ERROR": "ON",
    "SHADOWSERVE_TESTS": "ON",
    "SHADOWSERVE_BENCH": "ON",
}
BUILDS: Final = {
    "plain": Options({"SHADOWSERVE_TESTS": "ON", "SHADOWSERVE_BENCH": "ON"}),
    "sanitized": Options({"SHADOWSERVE_TESTS": "ON", "SHADOWSERVE_SANITIZE": "address,undefined"}),
    "threads": Options(
        {"SHADOWSERVE_TESTS": "ON", "SHADOWSERVE_SANITIZE": "thread"}, (*_THREADED, *_WITHOUT_FAULT_SWEEP)
    ),
    "libdeflate": _of_one_decoder("libdeflate"),
    "zlib": _of_one_decoder("zlib"),
    "fuzz": Options({"SHADOWSERVE_FUZZ": "ON"}, compiler="clang"),
    "aarch64-gcc": Options(_ARM, _WITHOUT_FAULT_SWEEP),
    "aarch64-clang": Options(_ARM, ("--tests-regex", "^test_(crc32|quantize|kvrans_kernels)$"), compiler="clang"),
}
"""In the order in which tests want them."""


class NativeBuild:
    """A build of the C core under ``build/``, kept between runs so that only changes are compiled."""

    def __init__(self, name: str, at_once: int = 2) -> None:
        self.directory = FOLDER / name
        self._passed = FOLDER / f"{name}.passed"
        self._options = options = BUILDS[name]
        self._at_once = at_once
        self.environment = dict(os.environ)
        # The tests of a sanitizer build are programs of their own: what this process preloads is not for them.
        self.environment.pop("LD_PRELOAD", None)
        # CMake and Ninja came with this interpreter's environment, which need not be the active one.
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        if options.compiler is not None:
            self.environment["CC"] = options.compiler
        generator = ["-G", "Ninja"] if shutil.which("ninja", path=self.environment["PATH"]) else []
        defines = [f"-D{key}={value}" for key, value in options.defines.items()]
        self.run(self._tool("cmake"), "-S", str(REPOSITORY), "-B", str(self.directory), *generator, *defines)
        self.run(self._tool("cmake"), "--build", str(self.directory), "--parallel", str(at_once))

    def _tool(self, name: str) -> str:
        """Return the program's path: a child's search path does not count when it is looked up."""
        return shutil.which(name, path=self.environment["PATH"]) or name

    def run(self, *command: str) -> str:
        """Run a command and return what it printed; fail the test with that where it fails."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=840)
        output = result.stdout + result.stderr
        assert result.returncode == 0, f"{' '.join(command)} exited with {result.returncode}:\n{output[-8000:]}"
        return output

    def ctest(self) -> str:
        """Run the build's tests, unless they have passed in this session; return what CTest said."""
        if not self._passed.exists():
            command = (self._tool("ctest"), "--test-dir", str(self.directory), "--output-on-failure")
            output = self.run(*command, "--parallel", str(self._at_once), *self._options.ctest)
            self._passed.write_text(output, encoding="utf-8")
        return self._passed.read_text(encoding="utf-8")


class Ahead:
    """The process that goes ahead of the tests."""

    def __init__(self, names: Sequence[str]) -> None:
        for name in names:
            (FOLDER / f"{name}.passed").unlink(missing_ok=True)
        # A session of its own, so that what it started ends with it.
        self._process = subprocess.Popen(
            [sys.executable, __file__, *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        """End it and all that it has started."""
        while self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)


def _main(names: Sequence[str]) -> None:
    os.nice(10)
    stopped = []
    # The same signal ends the compilers. What is waited for here is that none of them writes any more.
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    for name in names:
        if not stopped:
            with contextlib.suppress(AssertionError, OSError, subprocess.SubprocessError):  # a test will say so
                NativeBuild(name, at_once=1).ctest()


if __name__ == "__main__":
    _main(sys.argv[1:])

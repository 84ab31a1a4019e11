"""Programs of the project as child processes with preloaded imports. Imports take half a second of each start, eleven
seconds of that of a benchmark's engine, and thirty of ``vllm serve`` with its three processes.

``Preloaded`` replaces ``subprocess.Popen`` for ``python -m shadowserve_tools PROGRAM ...``, the benchmarks' engine and
``vllm serve``, whose processes are then forked from each other. A process that has only imported the program forks.
An intermediate parent ends at once, so the fork becomes a child of the tests. Some programs start normally: programs
that need a separate process or environment from the first instruction, those of ``deploy``, ``host`` and
``tools/test_cli``, which start as a user would start them, and one ``vllm serve``; at night also one that serves.
"""

import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from machine import WAIT_MAX_S

REQUEST_BYTES_MAX: Final = 1 << 20
_PR_SET_CHILD_SUBREAPER: Final = 36
_CLONE_NEWNET: Final = 0x40000000
_NETWORK: Final = "/proc/thread-self/ns/net"
_OURS: Final = [sys.executable, "-m", "shadowserve_tools"]
_ENGINE: Final = [sys.executable, "-m", "shadowserve_tools.bench.parts.engine"]
_SERVE: Final = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
_VLLM: Final = Path(sys.executable).with_name("vllm")
IMPORTED_BY_WORKERS: Final = (
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
    "host_control.vllm.connector",
)
"""Modules that a vLLM worker imports, some of them only when it starts."""
_IMPORTS: Final = {
    "storage": ("shadowserve_tools.programs.storage", "storage_kv.server"),
    "dpu": ("shadowserve_tools.programs.dpu", "dpu_dataplane.server"),
    "events": ("shadowserve_tools.events",),
    "engine": (
        "shadowserve_tools.bench.parts.engine",
        "vllm.entrypoints.llm",
        "vllm.v1.executor.uniproc_executor",
        *IMPORTED_BY_WORKERS,
    ),
    "serve": (
        "vllm.entrypoints.cli.benchmark.main",
        "vllm.entrypoints.cli.main",
        "vllm.entrypoints.cli.serve",
        "vllm.entrypoints.generate.api_router",
        "vllm.entrypoints.launchers.api_server.entry",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        *IMPORTED_BY_WORKERS,
    ),
}
_AT_ONCE: Final = ("SHADOWSERVE_NATIVE_LIBRARY", "SHADOWSERVE_TEST")
"""Environment variables that programs read during their import."""
_OF_ENGINES: Final = ("HF_", "OMP_", "PYTHONPATH", "VLLM_")
"""Variables that an engine's imports read. Engines with equal values are forked from the same process."""
_OF_EACH_ENGINE: Final = "VLLM_DIST_IDENT"
"""Variable that each engine sets in its process before it is read."""
_OF_CHILDREN: Final = ("PATH",)
"""Variables that only the programs read which an engine starts."""

_lock = threading.Lock()
_forkers: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], socket.socket]] = {}


class Preloaded(subprocess.Popen[Any]):
    """One program of the project. Popen arguments other than files, folder and environment start a new process."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *rest: Any
    ) -> None:
        cwd, environment, _, _, _, standard_in, in_end, out_end, standard_out, error_end, standard_error, *_ = rest
        new_session, group = rest[-2:]
        environment = dict(os.environ if environment is None else environment)
        command = _without_script(list(map(str, args)), environment)
        program = _program_of(command, environment)
        if not program or preexec_fn is not None or pass_fds or group not in (-1, 0):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *rest)  # type: ignore[misc]
            return
        files = [0 if standard_in == -1 else standard_in, 1 if standard_out == -1 else standard_out]
        files.append(2 if standard_error == -1 else standard_error)
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        alone = "setsid" if new_session else "setpgrp" if group == 0 else ""
        place = [str(cwd or os.getcwd()), sorted(os.sched_getaffinity(0)), alone, ignored]
        with _lock, open(_NETWORK, "rb") as network:
            files.append(network.fileno())
            self.pid = _fork(program, environment, json.dumps([command[3:], environment, *place]).encode(), files)
        self._child_created = True
        self._close_pipe_fds(standard_in, in_end, out_end, standard_out, error_end, standard_error)  # type: ignore[attr-defined]


def _without_script(command: list[str], environment: dict[str, str]) -> list[str]:
    """Return the command of ``vllm serve`` as a module's, if the search path leads to this environment's ``vllm``."""
    script = shutil.which("vllm", path=environment.get("PATH")) if command[:2] == ["vllm", "serve"] else None
    return [*_SERVE, *command[2:]] if script == str(_VLLM) else command


def _program_of(command: list[str], environment: dict[str, str]) -> tuple[str, ...]:
    """Return the program and the environment of its import, or nothing if the program must be imported again."""
    changed = {name for name, _ in environment.items() ^ dict(os.environ).items()}
    if command == _ENGINE or command[:4] == _SERVE:
        if not all(name.startswith(_OF_ENGINES + _OF_CHILDREN) for name in changed):
            return ()
        read = {name: value for name, value in environment.items() if name.startswith(_OF_ENGINES)}
        read.pop(_OF_EACH_ENGINE, None)
        return ("engine" if command == _ENGINE else "serve", *(f"{name}={read[name]}" for name in sorted(read)))
    shared = all(name.startswith(("SHADOWSERVE_", "AWS_")) and not name.startswith(_AT_ONCE) for name in changed)
    return (command[3],) if command[:3] == _OURS and command[3] in _IMPORTS and shared else ()


def _fork(program: tuple[str, ...], environment: dict[str, str], request: bytes, files: list[int]) -> int:
    if program not in _forkers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(WAIT_MAX_S)  # the wait includes the program's import
        command = [sys.executable, __file__, program[0], str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        _forkers[program] = process, ours
        theirs.close()
    forker = _forkers[program][1]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        socket.send_fds(forker, [request], files)
        answer = forker.recv(64)
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert answer, f"the forking process of '{program[0]}' has ended"
    return int(answer)


def _serve(connection: socket.socket) -> list[str]:
    """Fork at each request. Return in the forked process with its arguments."""
    while True:
        request, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, 4)
        if not request:
            sys.exit()
        arguments, environment, folder, cores, alone, ignored = json.loads(request)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                if alone:
                    getattr(os, alone)()
                os.write(writer, b"%d" % os.getpid())
                os.close(reader)
                os.close(writer)
                break
            os._exit(0)
        os.close(writer)
        os.waitpid(between, 0)
        connection.send(os.read(reader, 64))
        for each in (reader, *files):
            os.close(each)
    connection.close()
    network = files.pop()
    if not os.path.samestat(os.fstat(network), os.stat(_NETWORK)):
        assert ctypes.CDLL(None).setns(network, _CLONE_NEWNET) == 0
    os.close(network)
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    return list(map(str, arguments))


def _main(program: str, connection: int) -> None:
    for module in _IMPORTS[program]:
        importlib.import_module(module)
    runpy.run_path(str(Path(__file__).with_name("frozen_imports.py")))
    arguments = _serve(socket.socket(fileno=connection))
    if program == "engine":
        importlib.import_module(_ENGINE[-1]).main()
        os._exit(0)  # without freeing all imports one by one
    elif program == "serve":
        multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.get_context("fork")  # type: ignore
        sys.argv = ["vllm", *arguments]
        importlib.import_module("vllm.entrypoints.cli.main").main()
    else:
        importlib.import_module("shadowserve_tools").main(prog_name="shadowserve", args=arguments)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    _main(sys.argv[1], int(sys.argv[2]))

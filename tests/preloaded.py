"""Our programs as child processes that begin with everything imported: half a second of each start is imports.

``Preloaded`` is ``subprocess.Popen`` of ``python -m shadowserve_tools PROGRAM ...``. A process that has imported the
program, and done nothing else, forks; what it forks becomes a child of the tests by way of a parent that ends at once.
Programs whose process or environment must be their own from the first instruction start as everywhere else; so do those
of ``deploy``, ``e2e``, ``host`` and ``tools``, whichever way a user would.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, Final

from machine import PATIENCE_S

__all__ = ["Preloaded"]

REQUEST_BYTES_MAX: Final = 1 << 20
_PR_SET_CHILD_SUBREAPER: Final = 36
_OURS: Final = [sys.executable, "-m", "shadowserve_tools"]
_SERVERS: Final = {"storage": "storage_kv.server", "dpu": "dpu_dataplane.server"}
_AT_ONCE: Final = ("SHADOWSERVE_NATIVE_LIBRARY", "SHADOWSERVE_TEST")
"""What is looked at while a program is imported."""

_lock = threading.Lock()
_forkers: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}


class Preloaded(subprocess.Popen[Any]):
    """One of our programs. What asks ``Popen`` for more than files, a folder and an environment starts it anew."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *rest: Any
    ) -> None:
        cwd, environment, _, _, _, standard_in, in_end, out_end, standard_out, error_end, standard_error, *_ = rest
        plain = preexec_fn is None and not pass_fds and rest[-1] == -1 and not rest[-2]
        command = list(map(str, args))
        environment = dict(os.environ if environment is None else environment)
        changed = {name for name, _ in environment.items() ^ dict(os.environ).items()}
        shared = all(name.startswith("SHADOWSERVE_") and not name.startswith(_AT_ONCE) for name in changed)
        if not (plain and shared and command[:3] == _OURS and command[3] in _SERVERS):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, *rest)  # type: ignore[misc]
            return
        files = [0 if standard_in == -1 else standard_in, 1 if standard_out == -1 else standard_out]
        files.append(2 if standard_error == -1 else standard_error)
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        request = [command[3:], environment, str(cwd or os.getcwd()), ignored]
        with _lock:
            self.pid = _fork(command[3], json.dumps(request).encode(), files)
        self._child_created = True
        self._close_pipe_fds(standard_in, in_end, out_end, standard_out, error_end, standard_error)  # type: ignore[attr-defined]


def _fork(program: str, request: bytes, files: list[int]) -> int:
    if program not in _forkers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(PATIENCE_S)  # importing the program is what it may wait for
        command = [sys.executable, __file__, program, str(theirs.fileno())]
        _forkers[program] = subprocess.Popen(command, pass_fds=[theirs.fileno()]), ours
        theirs.close()
    forker = _forkers[program][1]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        socket.send_fds(forker, [request], files)
        answer = forker.recv(64)
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert answer, f"what forks 'shadowserve {program}' has ended"
    return int(answer)


def _serve(connection: socket.socket) -> list[str]:
    """Fork whenever asked to; returns in what was forked, with its arguments."""
    while True:
        request, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES_MAX, 3)
        if not request:
            sys.exit()
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                os.close(reader)
                os.close(writer)
                break
            os.write(writer, b"%d" % child)
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(os.read(reader, 64))
        for each in (reader, writer, *files):
            os.close(each)
    connection.close()
    arguments, environment, folder, ignored = json.loads(request)
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    return list(map(str, arguments))


if __name__ == "__main__":
    del sys.path[0]  # this folder
    from shadowserve_tools import main

    importlib.import_module(f"shadowserve_tools.programs.{sys.argv[1]}")
    importlib.import_module(_SERVERS[sys.argv[1]])
    gc.freeze()
    main(prog_name="shadowserve", args=_serve(socket.socket(fileno=int(sys.argv[2]))))

"""Measures whether the time of an answer tells a tenant what another tenant has.

Method: one tenant stores 256 keys. Another asks, in random order, for those keys, for its own and for absent ones.
``guess`` is how often the slower of two answers is that of the other tenant's key: 0.5 is chance. The same for two
halves of the absent keys shows chance; the tenant's own keys show that the test can see a difference.
``guess_beyond_chance`` is the distance from 0.5, over the distance that two equal samples keep 99 times in 100.

Prediction: 0.5 within chance, since tenant and key form one key and the same code runs.
"""

import random
import secrets
import socket
import time
from typing import Final

import click
import numpy as np
import numpy.typing as npt

from shadowserve.errors import ShadowServeError
from shadowserve.keys import storage_key
from shadowserve.resp import encode_command
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Output, Report, output_options, tracked

_COMMANDS: Final = ("GET", "EXISTS", "STRLEN")
_KEYS: Final = 256
_ABSENT_OF: Final = {"GET": b"$-1\r\n", "EXISTS": b":0\r\n", "STRLEN": b":0\r\n"}


@click.command()
@click.option(
    "--samples", default=20_000, show_default=True, type=click.IntRange(100), help="Samples of each kind of key."
)
@output_options
def isolation(samples: int, output: Output) -> None:
    """Measure whether the time of an answer tells one tenant what another one has."""
    report = Report("isolation", ["command", "kind", "median_us", "p99_us", "guess", "samples"], bars=["guess"])
    password = secrets.token_hex(16)
    beyond, own = [], []
    with Programs() as programs:
        users = programs.logs / "users.acl"
        users.write_text("".join(f"user {name} on >{password} ~* +@all tenant={name}\n" for name in ("ann", "bob")))
        server = programs.storage("--users-file", str(users), "--io-threads", "1")
        ann, bob = (programs.enter_context(_Asker(server.address, name, password)) for name in ("ann", "bob"))
        keys = {
            kind: [storage_key(secrets.token_bytes(32)) for _ in range(_KEYS)] for kind in ("foreign", "own", "absent")
        }
        for key in keys["foreign"]:
            ann.ask(encode_command("SET", key, b"x" * 4096))
        for key in keys["own"]:
            bob.ask(encode_command("SET", key, b"x" * 4096))
        for command in tracked(_COMMANDS, "asking"):
            times = _times(bob, command, keys, samples)
            for kind, taken in times.items():
                guess = _guess(taken, times["absent"]) if kind != "absent" else _guess(taken[::2], taken[1::2])
                report.row(
                    command=command, kind=kind, median_us=float(np.median(taken)) / 1e3,
                    p99_us=float(np.percentile(taken, 99)) / 1e3, guess=guess, samples=len(taken),
                )  # fmt: skip
            beyond.append(abs(_guess(times["foreign"], times["absent"]) - 0.5) / _chance(samples))
            own.append(abs(_guess(times["own"], times["absent"]) - 0.5) / _chance(samples))
    report.ratio("guess_beyond_chance", beyond, "at most 1")
    report.ratio("own_guess_beyond_chance", own, "above it shows that the test can tell")
    report.finish(output)


class _Asker:
    """A connection of one user, with as little Python as possible."""

    def __init__(self, address: str, name: str, password: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.ask(encode_command("AUTH", name, password)) != b"+OK\r\n":
            raise ShadowServeError(f"the storage server does not take its own user {name}; please report this")

    def ask(self, command: bytes) -> bytes:
        """Send a command and return its answer, less than 64 KiB, in one piece."""
        self._socket.sendall(command)
        return self._socket.recv(1 << 16)

    def __enter__(self) -> "_Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def _times(asker: _Asker, command: str, keys: dict[str, list[bytes]], samples: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return the nanoseconds of answers by kind of key, in random order, after a warm-up."""
    requests = {kind: [encode_command(command, key) for key in keys[kind]] for kind in keys}
    order = [kind for kind in keys for _ in range(samples)]
    random.SystemRandom().shuffle(order)
    taken: dict[str, list[int]] = {kind: [] for kind in keys}
    clock, ask, absent = time.perf_counter_ns, asker.ask, _ABSENT_OF[command]
    warm_up = order[:1000]
    for number, kind in enumerate([*warm_up, *order]):
        request = requests[kind][number % _KEYS]
        begin = clock()
        answer = ask(request)
        took = clock() - begin
        if (answer == absent) != (kind != "own"):
            raise ShadowServeError(
                f"{command} of a key that is {kind} was answered {answer[:40]!r}; please report this"
            )
        if number >= len(warm_up):
            taken[kind].append(took)
    return {kind: np.array(values) for kind, values in taken.items()}


def _guess(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> float:
    """Return how often a value of ``first`` exceeds one of ``second``, ties counted half (Mann and Whitney's U)."""
    ordered = np.sort(second)
    below = np.searchsorted(ordered, first, "left") + np.searchsorted(ordered, first, "right")
    return float(below.mean() / 2 / len(second))


def _chance(samples: int) -> float:
    """Return the distance from 0.5 that two equal samples keep 99 times in 100."""
    return float(2.576 * np.sqrt((2 * samples + 1) / (12 * samples * samples)))

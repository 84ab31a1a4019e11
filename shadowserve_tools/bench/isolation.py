"""Measures whether the time of an answer tells a tenant what another tenant has.

Method: one tenant stores 256 keys. Another asks, in random order, for those keys, for its own and for absent ones.
``guess`` is how often the slower of two answers is that of the other tenant's key: 0.5 is chance. The same for two
halves of the absent keys shows chance; the tenant's own keys show that the test can see a difference.
``guess_beyond_chance`` is the distance from 0.5, over the distance that two equal samples keep 99 times in 100.

Prediction: 0.5 within chance, since tenant and key form one key and the same code runs.
"""

import random
import secrets
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from shadowserve.errors import ShadowServeError
from shadowserve.keys import storage_key
from shadowserve.resp import encode_command
from shadowserve_tools.bench.parts.lean import LeanSocket
from shadowserve_tools.bench.parts.options import benchmark, whole
from shadowserve_tools.processes import Programs
from shadowserve_tools.report import Report, tracked

_ABSENT_OF: Final = {"GET": b"$-1\r\n", "EXISTS": b":0\r\n", "STRLEN": b":0\r\n"}
"""Answer of each command to an absent key."""
_KEYS: Final = 256
_ANSWER_BYTES: Final = 1 << 16


@benchmark("command", "kind", "median_us", "p99_us", "guess", "samples", bars=["guess"])
@whole("--samples", 20_000, "Samples of each kind of key.", 100)
def isolation(report: Report, programs: Programs, samples: int) -> None:
    """Measure whether the time of an answer tells one tenant what another one has."""
    password = secrets.token_hex(16)
    beyond, own = [], []
    users = programs.logs / "users.acl"
    users.write_text("".join(f"user {name} on >{password} ~* +@all tenant={name}\n" for name in ("ann", "bob")))
    server = programs.storage("--users-file", str(users), "--io-threads", "1")
    ann, bob = (programs.enter_context(LeanSocket(server.address)) for _ in range(2))
    for client, name in ((ann, "ann"), (bob, "bob")):
        client.call("AUTH", name, password)
    keys = {kind: [storage_key(secrets.token_bytes(32)) for _ in range(_KEYS)] for kind in ("foreign", "own", "absent")}
    for client, kind in ((ann, "foreign"), (bob, "own")):
        for key in keys[kind]:
            client.call("SET", key, b"x" * 4096)
    for command in tracked(_ABSENT_OF, "asking"):
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


def _times(
    client: LeanSocket, command: str, keys: dict[str, list[bytes]], samples: int
) -> dict[str, npt.NDArray[np.int64]]:
    """Return the nanoseconds of answers by kind of key, in random order, after a warm-up."""
    requests = {kind: [encode_command(command, key) for key in keys[kind]] for kind in keys}
    order = [kind for kind in keys for _ in range(samples)]
    random.SystemRandom().shuffle(order)
    taken: dict[str, list[int]] = {kind: [] for kind in keys}
    clock, connection, absent = time.perf_counter_ns, client.socket, _ABSENT_OF[command]
    warm_up = order[:1000]
    for number, kind in enumerate([*warm_up, *order]):
        request = requests[kind][number % _KEYS]
        begin = clock()
        connection.sendall(request)
        answer = connection.recv(_ANSWER_BYTES)  # in one piece
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

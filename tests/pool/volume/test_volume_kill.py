"""A process that writes to a real file is killed at random moments, repeatedly."""

import os
import random
import select
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from machine import NEVER_S
from volume_support import POOL, Store, key

from shadowserve.native import BlockDevice
from shadowserve.pool.volume.tickets import BusyError
from shadowserve.pool.volume.volume import Volume

KILLS = 6
KEYS = 30
CAPACITY = 16 << 20


def value(number: int, turn: int) -> bytes:
    return b"%4d %8d " % (number, turn) * (1 + (number * 7 + turn) % 3000)


def write_until_killed(path: str, turn: int) -> None:
    """Write values, and print each durable one on standard output."""
    with closing(BlockDevice(path)) as device:
        store = Store(device, seed=turn)
        chance = random.Random(turn)
        while True:
            number, turn = chance.randrange(KEYS), turn + 1
            try:
                store.put(key(number), value(number, turn), what=(number, turn))
            except BusyError:
                pass
            while True:
                store.step()
                for what, error in store.settled:
                    assert error is None and isinstance(what, tuple)
                    os.write(1, b"%d %d\n" % what)
                store.settled.clear()
                if len(store.volume._writing) < 8:
                    break
                select.select([device.fileno()], [], [], 0.05)


def test_acknowledged_objects_survive_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "device"
    with closing(BlockDevice(path, size=CAPACITY)) as device:
        Volume.format(device, pool_id=POOL, objects_max=100, log_bytes=64 << 12)
    durable: dict[int, int] = {}
    chance = random.Random(0)
    for kill in range(KILLS):
        command = [sys.executable, __file__, str(path), str(1_000_000 * (kill + 1))]
        places = os.pathsep.join([str(folder) for folder in Path(__file__).parents[:3]])
        environment = {**os.environ, "PYTHONPATH": places}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
            for _ in range(chance.randrange(50, 300)):
                number, turn = map(int, child.stdout.readline().split())
                durable[number] = max(durable.get(number, 0), turn)
            os.kill(child.pid, signal.SIGKILL)
            for line in child.stdout.read().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    number, turn = map(int, line.split())
                    durable[number] = max(durable.get(number, 0), turn)
            child.wait(NEVER_S)
        with closing(BlockDevice(path)) as device:
            store = Store(device, seed=kill + 77)
            assert not store.volume.report.notes
            for number, turn in durable.items():
                found = store.get(key(number))
                assert found is not None, (number, turn)
                there = int(found.split(None, 2)[1])
                assert there >= turn and found == value(number, there)
                durable[number] = there
            store.volume.close()


if __name__ == "__main__":
    write_until_killed(sys.argv[1], int(sys.argv[2]))

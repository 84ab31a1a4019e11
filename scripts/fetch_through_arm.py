"""Fetch and store chunks through a data plane that is Arm code, and compare them with this machine's own arithmetic.

    fetch_through_arm.py ROOT PYTHON

Used by scripts/test-aarch64-root, which makes ROOT. The storage server is a process of this machine; so are the encoder
of what is fetched and the decoder of what was stored.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "dataplane")]

from dataplane_support import Client, DaemonProcess, Server, keys_of, kv, layout, make_record  # noqa: E402

from shadowserve import record  # noqa: E402
from shadowserve.keys import storage_key  # noqa: E402
from shadowserve.proto import dataplane_pb2 as pb  # noqa: E402

CHUNKS = 4
AARCH64 = 183  # e_machine of ELF
TIMEOUT_MS = 120_000  # emulation is slow, and the machine may be busy


def mapped_core(daemon: DaemonProcess, root: Path) -> None:
    """Check that what runs is Arm code: the C core that the process has mapped, and its libraries."""
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    for name in ("libshadowserve.so", "libc.so.6", "libisal-"):
        of_root = [path for path in paths if path.startswith(str(root)) and name in path]
        assert of_root, f"the daemon has not mapped {root}'s {name}"
        header = Path(of_root[0]).read_bytes()[:20]
        assert int.from_bytes(header[18:20], "little") == AARCH64, f"{of_root[0]} is no Arm code"


async def fetch(client: Client, storage: Server, quantizer: str, codec: str) -> None:
    """Fetch chunks that were encoded here."""
    shape = layout(quantizer)
    keys = keys_of(shape, CHUNKS, seed=sum(codec.encode()))
    records = [make_record(shape, key, seed, codec) for seed, key in enumerate(keys)]
    for key, data in zip(keys, records, strict=True):
        storage.put(key, data)
    await client.register(shape, CHUNKS)
    await client.lookup(keys, timeout_ms=TIMEOUT_MS)
    answer = await client.fetch(keys, timeout_ms=TIMEOUT_MS)
    assert answer.outcome == pb.OUTCOME_COMPLETE, answer
    for index, (key, data) in enumerate(zip(keys, records, strict=True)):
        assert client.chunk(index) == bytes(record.decode(data, key, shape)), f"chunk {index} differs"
    print(f"fetched {CHUNKS} chunks, {quantizer}, {codec}: as decoded here")


async def store(client: Client, storage: Server, quantizer: str) -> None:
    """Store chunks through the daemon; the records must be those that are made here."""
    from redis import Redis

    shape = layout(quantizer)
    keys = keys_of(shape, CHUNKS, seed=99)
    await client.register(shape, CHUNKS)
    client.segment.memory[:] = bytearray(b"".join(kv(shape, index) for index in range(CHUNKS)))
    answer = await client.store(keys, timeout_ms=TIMEOUT_MS)
    assert answer.outcome == pb.OUTCOME_COMPLETE, answer
    with Redis(port=storage.port) as connection:
        for index, key in enumerate(keys):
            data = connection.get(storage_key(key))
            assert isinstance(data, bytes) and data == make_record(shape, key, index), f"record {index} differs"
    print(f"stored {CHUNKS} chunks, {quantizer}: as encoded here, byte for byte")


async def run(root: Path, python: str, directory: Path) -> None:
    """Start a storage server and the daemon, and put chunks through it both ways."""
    storage = Server("storage_kv", directory).start()
    # -P: not the modules of the folder that this is started in.
    emulator = ["qemu-aarch64", "-cpu", "neoverse-n1", "-L", str(root), "-E", f"PYTHONPATH={root / 'site'}"]
    daemon = DaemonProcess(storage, directory, python=[*emulator, python, "-P"], command_timeout_s=60)
    client = Client(daemon.address)
    try:
        mapped_core(daemon, root)
        for codec in ("kvrans", "deflate", "lz4", "zstd"):
            await fetch(client, storage, "binned", codec)
        await fetch(client, storage, "lossless", "kvrans")
        await store(client, storage, "binned")
        assert daemon.stop(timeout=60) == 0, daemon.log.read_text()
    finally:
        await client.close()
        daemon.close()
        storage.kill()
    assert "Traceback" not in daemon.log.read_text(), daemon.log.read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(run(Path(sys.argv[1]), sys.argv[2], Path(temporary)))
    print("The data plane ran as Arm code under qemu-user. That says nothing about speed or about a DPU's devices.")

"""Failing networks: flipped bits, half-open connections, resets."""

import subprocess
import sys
from pathlib import Path

from callers import Prompt
from cases import KEYS, Context, case
from nodes import ENGINES, REPOSITORY

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import storage_key


@case(
    "half-open TCP",
    "the network forwards nothing for a second, and no endpoint is notified; then everything again",
    engines=ENGINES,
    repetitions=2,
    short=("memory",),
)
def half_open(context: Context) -> None:
    storage = context.storage()
    context.fill(storage)
    proxy = context.proxy(storage.port)
    with context.load(proxy.port, deadline_s=0.5, silence="the network is silent"):
        context.pause(0.1, 0.3)
        proxy.silent = True
        context.pause(0.8, 1.2)
        proxy.silent = False
        context.pause(0.1, 0.3)
    context.verify(storage, KEYS)


@case("connection reset", "the network resets every connection, again and again", engines=ENGINES, repetitions=2)
def resets(context: Context) -> None:
    storage = context.storage()
    proxy = context.proxy(storage.port)
    with context.load(proxy.port, deadline_s=5, silence="the network has cut it"):
        for _ in range(10):
            context.pause(0.02, 0.15)
            proxy.cut()
    context.verify(storage)


def _records(context: Context) -> dict[bytes, bytes]:
    """Return valid records by their keys."""
    layout = ChunkLayout(
        namespace=b"f" * 32,
        dtype=DType.UINT8,
        layers=2,
        kinds=2,
        vector_length=64,
        tokens=64,
        quantizer=Quantizer.PASSTHROUGH,
    )
    made = {}
    for _ in range(60):
        name = context.chance.randbytes(32)
        data = context.chance.randbytes(layout.raw_bytes)
        made[storage_key(name)] = record.encode(name, native.Codec.NONE, layout, data)
    return made


@case(
    "bit rot on the wire",
    "to the server, while records are stored: it takes sound ones only; read over a sound network",
    engines=("memory", "pool"),
    repetitions=2,
)
def flips_while_storing(context: Context) -> None:
    storage = context.storage()
    proxy = context.proxy(storage.port)
    proxy.flip_one_in, proxy.flips = 3, "up"
    caller = context.caller(proxy.port, deadline_s=0.7, silence="the server waits for the bytes of a flipped length")
    made = _records(context)
    for key, data in made.items():
        caller.set_to(key.decode(), data)
    assert proxy.flipped
    context.expected.losable = "a flipped bit: another key was meant to be stored"
    context.verify(storage)


@case("bit rot on the wire", "both ways, with TLS: whatever the values are", engines=("memory", "pool"), repetitions=2)
def flips_under_tls(context: Context) -> None:
    folder = _certificates(context.folder)
    storage = context.storage(tls_cert=folder / "server.crt", tls_key=folder / "server.key")
    secure = {"ssl": True, "ssl_ca_certs": str(folder / "ca.crt"), "ssl_check_hostname": False}
    proxy = context.proxy(storage.port)
    with context.load(proxy.port, deadline_s=2, silence="one side waits for the bytes of a flipped length", **secure):
        context.pause(0.2, 0.4)
        proxy.flip_one_in = 12
        context.pause(1.0, 1.5)
        proxy.flip_one_in = 0
    assert proxy.flipped
    context.caller(storage.port, **secure).verify()


@case(
    "bit rot on the wire",
    "between data plane and storage: the host gets sound chunks or fewer of them",
    engines=("memory", "pool"),
    repetitions=2,
    short=("memory",),
)
def flips_under_a_data_plane(context: Context) -> None:
    storage = context.storage()
    sound = context.data_plane(storage.port)
    prompts = [Prompt(f"{context.seed}/{number}", 6) for number in range(4)]
    writer = context.host(sound.address)
    writer.store_whole(prompts)
    proxy = context.proxy(storage.port)
    plane = context.data_plane(proxy.port, command_timeout_s=0.7, delete_corrupt="false")
    host = context.host(plane.address, deadline_s=2)
    proxy.flip_one_in = 8
    for _ in range(12):
        host.fetch(context.chance.choice(prompts), stored=6, losable="bits flip on the wire")
    assert proxy.flipped
    for prompt in prompts:
        writer.fetch(prompt, stored=6)


def _certificates(folder: Path) -> Path:
    made = folder / "certificates"
    made.mkdir()
    subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "make-certificates", made], check=True, capture_output=True
    )
    return made

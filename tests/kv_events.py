"""KV events as routers read them: what the documents of llm-d and Dynamo name, and an index made from a feed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
from machine import WAIT_MAX_S
from preloaded import Preloaded

_REPOSITORY = Path(__file__).parents[1]
END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, tag="BlockStored", tag_field="type", kw_only=True):
    """llm-d needs hashes, tokens and block size; Dynamo also reads the parent and the adapter. Hashes have 64 bits."""

    block_hashes: list[int]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | None
    lora_id: int | None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", tag_field="type", kw_only=True):
    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)


class Index:
    """The hashes of a medium that a router would hold, and the batches that it took."""

    def __init__(self) -> None:
        self.hashes: set[int] = set()
        self.batches: dict[int, Batch] = {}

    def take(self, number: int, payload: bytes) -> None:
        batch = self.batches[number] = DECODER.decode(payload)
        for event in batch.events:
            match event:
                case BlockStored():
                    self.hashes.update(event.block_hashes)
                case BlockRemoved():
                    self.hashes.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.hashes.clear()


def replayed(endpoint: str, first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the batches that a publisher still has, from a number on."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(endpoint)
        asking.send_multipart((b"", first.to_bytes(8, "big")))
        while asking.poll(1000 * WAIT_MAX_S):
            _, _, number, payload = asking.recv_multipart()
            if number == END:
                return
            yield int.from_bytes(number, "big"), payload
    raise AssertionError("no replay")


def replayed_index(endpoint: str) -> Index:
    index = Index()
    for number, payload in replayed(endpoint):
        index.take(number, payload)
    return index


class Router:
    """A subscriber of ``shadowserve events``, which requests lost batches again."""

    def __init__(self, port: int, folder: Path, *flags: str, password: str = "") -> None:
        self.replays = f"ipc://{folder}/replay"
        command = [sys.executable, "-m", "shadowserve_tools", "events", f"127.0.0.1:{port}", "--interval", "0.01"]
        command += ["--endpoint", f"ipc://{folder}/pub", "--replay-endpoint", self.replays, *flags]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SHADOWSERVE_")}
        self._command, self._env = command, clean | ({"SHADOWSERVE_STORAGE_PASSWORD": password} if password else {})
        self.start()
        self._context = zmq.Context()
        self._subscribed = self._context.socket(zmq.SUB)
        self._subscribed.linger = 0
        self._subscribed.connect(f"ipc://{folder}/pub")
        self._subscribed.subscribe(b"")
        self.index = self.replayed()

    def start(self) -> None:
        self.process = Preloaded(self._command, cwd=_REPOSITORY, env=self._env, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline().startswith("ready")

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(WAIT_MAX_S) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()

    def replayed(self) -> Index:
        """Return a new router's index, of what the program has kept."""
        return replayed_index(self.replays)

    def take(self) -> None:
        """Take what has been published."""
        while self._subscribed.poll(0):
            _, number, payload = self._subscribed.recv_multipart()
            at = int.from_bytes(number, "big")
            if at == max(self.index.batches, default=-1) + 1:
                self.index.take(at, payload)
            elif at not in self.index.batches:
                self.index = self.replayed()

    def agrees(self, stored: set[int]) -> bool:
        """Take what has been published; return whether the index has the hashes of what is stored."""
        self.take()
        return self.index.hashes == stored

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._subscribed.close()
        self._context.term()

"""KV events as routers read them: what the documents of llm-d and Dynamo name, and an index made from a feed."""

from collections.abc import Iterator
from typing import Any

import msgspec
import zmq
from machine import WAIT_MAX_S

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

"""Batches with bodies in this process, through the binding: they are read in place, and kept until the batch ends."""

import mmap
import socket
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shadowserve import native
from shadowserve.chunk import DType, Quantizer
from shadowserve.errors import NativeError
from shadowserve.native import Origin, Result
from shadowserve.resp import NEED_DATA, CommandReader

CHUNKS, SLICES, SLICE_BYTES = 4, 3, 4096
CHUNK_BYTES = SLICES * SLICE_BYTES
DATA = np.random.default_rng(11).integers(0, 256, (CHUNKS, CHUNK_BYTES), np.uint8)


def make_batch(
    target: NDArray[np.uint8], bodies: dict[int, Any], deadline_ns: int = 2**62, groups: int = 1
) -> native.Batch:
    """A batch of bodies without quantizer and codec, so a body equals the delivered bytes. Groups share the target."""
    pieces, slices = np.zeros(CHUNKS, native.PIECE_DTYPE), np.zeros(CHUNKS * SLICES, native.SLICE_DTYPE)
    pieces["codec"], pieces["slice_count"], pieces["body_length"] = native.Codec.NONE, SLICES, CHUNK_BYTES
    pieces["group"], pieces["chunk"] = np.divmod(np.arange(CHUNKS), CHUNKS // groups)
    pieces["slice_first"] = SLICES * np.arange(CHUNKS)
    pieces["decompression_offset"] = CHUNK_BYTES * np.arange(CHUNKS)
    pieces["key"] = [b"chunk %d" % index for index in range(CHUNKS)]
    pieces["key_length"] = 7
    slices["offset"] = np.tile(SLICE_BYTES * np.arange(SLICES), CHUNKS)
    slices["memory_offset"] = np.tile(SLICE_BYTES * np.arange(CHUNKS * SLICES // groups), groups)
    slices["encoded_length"] = slices["decoded_length"] = SLICE_BYTES
    slices["vectors"] = 16
    slices["checksum"] = slices["decoded_crc32"] = [native.crc32(part) for part in DATA.reshape(-1, SLICE_BYTES)]
    parts = [
        native.Group(quantizer=Quantizer.PASSTHROUGH, dtype=DType.UINT8, vector_length=SLICE_BYTES // 16, memory=part)
        for part in np.split(target, groups)
    ]
    pieces["origin"][list(bodies)] = Origin.AWAITED
    batch = native.Batch(pieces=pieces, slices=slices, groups=parts, deadline_ns=deadline_ns)
    for index, body in bodies.items():
        batch.supply(index, body)
    return batch


@pytest.fixture
def target() -> NDArray[np.uint8]:
    return np.zeros(CHUNKS * CHUNK_BYTES, np.uint8)


def make_pipeline(decompression_bytes: int = CHUNKS * CHUNK_BYTES) -> native.Pipeline:
    return native.Pipeline(decompression_bytes=decompression_bytes, store_bytes=4096, pin_memory=False)


def test_bodies_of_any_buffer_are_delivered_without_a_socket_or_room(target: NDArray[np.uint8]) -> None:
    shared = mmap.mmap(-1, CHUNK_BYTES)
    shared[:] = DATA[1].tobytes()
    bodies = {0: DATA[0].tobytes(), 1: shared, 2: DATA[2], 3: memoryview(bytearray(DATA[3]))}
    with make_pipeline(decompression_bytes=1) as pipeline:
        batch = make_batch(target, bodies)
        with pytest.raises(BufferError):
            shared.close()  # while a read is possible
        assert pipeline.fetch(batch) is Result.OK
        assert batch.received_bytes == 0
        batch.release()
        shared.close()
    assert (target.reshape(DATA.shape) == DATA).all()


def test_bodies_and_what_a_server_sends_make_one_round(target: NDArray[np.uint8]) -> None:
    near, far = socket.socketpair()
    near.setblocking(False)

    def serve() -> None:
        reader = CommandReader()
        while data := far.recv(4096):
            reader.feed(data)
            while (command := reader.next_command()) is not NEED_DATA:
                assert isinstance(command, list) and command[0] == b"GETRANGE"
                key, first, last = bytes(command[1]), int(bytes(command[2])), int(bytes(command[3]))
                part = DATA[int(key[-1:])].tobytes()[first : last + 1]
                far.sendall(b"$%d\r\n%b\r\n" % (len(part), part))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with make_pipeline() as pipeline:
            batch = make_batch(target, {0: DATA[0], 3: DATA[3]})
            assert pipeline.fetch(batch, [near.fileno()]) is Result.OK
            assert 2 * CHUNK_BYTES <= batch.received_bytes < 2 * CHUNK_BYTES + 1000
            assert batch.sockets_in_sync
            batch.release()
    finally:
        near.close()
        thread.join()
        far.close()
    assert (target.reshape(DATA.shape) == DATA).all()


def test_a_damaged_body_costs_its_own_group_alone(target: NDArray[np.uint8]) -> None:
    bad = DATA.copy()
    bad[0, 5000] ^= 1
    with make_pipeline() as pipeline:
        batch = make_batch(target, dict(enumerate(bad)), groups=2)
        assert pipeline.fetch(batch) is Result.CHECKSUM
        assert batch.results[0] is Result.CHECKSUM and batch.results[2:] == [Result.OK, Result.OK]
        batch.release()
        assert pipeline.fetch(batch) is Result.BAD_ARGUMENT, "a released batch has no groups"
    assert (target.reshape(DATA.shape)[2:] == DATA[2:]).all()


def test_a_body_of_another_length_is_refused(target: NDArray[np.uint8]) -> None:
    with pytest.raises(NativeError, match="a body of 5 bytes for piece 1, which has 12288") as caught:
        make_batch(target, {1: b"short"})
    assert caught.value.result is Result.BAD_ARGUMENT


def test_a_chunk_that_nobody_has_needs_a_socket(target: NDArray[np.uint8]) -> None:
    with make_pipeline() as pipeline:
        batch = make_batch(target, {0: DATA[0]})
        assert pipeline.fetch(batch) is Result.BAD_ARGUMENT
        batch.release()
    assert not target.any()

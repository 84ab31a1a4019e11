"""All faults together: restarted and empty storage, short deadlines, cancellations, damage, many callers."""

import asyncio
import random
from collections.abc import Callable

from dataplane_support import Client, Fetched, Server, StartServer, Stored, keys_of, kv, layout, make_record, running
from machine import WAIT_MAX_S, until

from dpu_dataplane.server import Daemon
from shadowserve.proto import dataplane_pb2 as pb

SHAPE = layout(vector_length=1024)
CALLERS = 4
CHUNKS = 6
KEYS = [keys_of(SHAPE, CHUNKS, seed=seed) for seed in range(CALLERS)]
EXPECTED = [[kv(SHAPE, 100 * caller + index) for index in range(CHUNKS)] for caller in range(CALLERS)]
POSSIBLE = {
    pb.OUTCOME_COMPLETE,
    pb.OUTCOME_ABSENT,
    pb.OUTCOME_CORRUPT,
    pb.OUTCOME_NOT_A_RECORD,
    pb.OUTCOME_STORAGE_UNAVAILABLE,
    pb.OUTCOME_DEADLINE,
    pb.OUTCOME_CANCELLED,
}


async def call_at_random(daemon: Daemon, caller: int, stop: asyncio.Event) -> int:
    """Store, fetch and cancel until ``stop``. Check every reported chunk, and return their number."""
    luck = random.Random(caller)
    client = Client(daemon.address)
    delivered = 0
    try:
        await client.register(SHAPE, CHUNKS)
        while not stop.is_set():
            timeout = luck.choice([5, 30, 5000])
            if luck.random() < 0.4:
                client.write(EXPECTED[caller])
                answer: Fetched | Stored = await client.store(
                    KEYS[caller], timeout_ms=timeout, job_id=f"store-{caller}-{client._jobs}"
                )
            else:
                client.segment.memory[:] = 0xEE
                job_id = f"{caller}-{client._jobs}"
                fetch = asyncio.ensure_future(client.fetch(KEYS[caller], timeout_ms=timeout, job_id=job_id))
                if luck.random() < 0.3:
                    await asyncio.sleep(luck.random() * 0.01)
                    await client.stub.Cancel(pb.CancelRequest(job_id=job_id))
                answer = await fetch
                found = [client.chunk(index) for index in range(answer.chunks)]
                assert found == EXPECTED[caller][: answer.chunks]
                delivered += answer.chunks
                before = client.segment.memory.tobytes()
                await asyncio.sleep(0.002)
                assert client.segment.memory.tobytes() == before, "the daemon wrote to memory after its answer"
            assert answer.outcome in POSSIBLE, answer
    finally:
        await client.close()
    return delivered


def corrupt(server: Server, luck: random.Random) -> None:
    """Replace some chunk by a record with a flipped bit. Plain Redis accepts it; the storage node would refuse it."""
    caller, index = luck.randrange(CALLERS), luck.randrange(CHUNKS)
    data = bytearray(make_record(SHAPE, KEYS[caller][index], 100 * caller + index))
    data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
    server.put(KEYS[caller][index], bytes(data))


async def test_no_answer_is_ever_wrong(start_server: StartServer) -> None:
    luck = random.Random(0)
    stop = asyncio.Event()
    storage = start_server(kind="redis")
    async with running(storage, connect_timeout_s=1.0, quarantine_s=0.1) as (daemon, _):
        callers = [asyncio.create_task(call_at_random(daemon, caller, stop)) for caller in range(CALLERS)]
        fetches, integrity_failures = daemon.metrics.fetches, daemon.metrics.integrity_failures

        async def happens(condition: Callable[[], object]) -> None:
            """Wait until the callers fetch it, or one of them has failed."""
            await until(lambda: condition() or any(caller.done() for caller in callers))
            await asyncio.wait(callers, timeout=0.1)

        for event in ("corrupt", "kill", "corrupt", "freeze", "corrupt"):
            complete = fetches["complete"]
            await happens(lambda seen=complete: fetches["complete"] > seen)
            if event == "kill":
                await asyncio.to_thread(storage.kill)
                away = fetches["storage_unavailable"]
                await happens(lambda seen=away: fetches["storage_unavailable"] > seen)
                await asyncio.to_thread(storage.start)
            elif event == "freeze":
                await asyncio.to_thread(storage.freeze)
                late = fetches["deadline"]
                await happens(lambda seen=late: fetches["deadline"] > seen)
                storage.thaw()
            else:
                found = integrity_failures["corrupt"]
                async with asyncio.timeout(WAIT_MAX_S):
                    while integrity_failures["corrupt"] == found and not any(caller.done() for caller in callers):
                        for _ in range(10):
                            await asyncio.to_thread(corrupt, storage, luck)
                        await asyncio.wait(callers, timeout=0.1)
        stop.set()
        delivered = await asyncio.gather(*callers)
        assert sum(delivered) > 0
        assert "internal" not in fetches and "internal" not in daemon.metrics.stores
        assert fetches["complete"] and fetches["storage_unavailable"]
        assert integrity_failures["corrupt"]

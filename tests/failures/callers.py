"""Clients of a store that judge every answer during faults: redis-py, and the host's client of a data plane."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import redis
from machine import WAIT_MAX_S, wait_for
from outcomes import ABSENT, BOUND_S, Expected, Outcome, Tally
from redis.backoff import NoBackoff
from redis.retry import Retry

from host_control.client import DataPlaneClient, FetchPart
from host_control.registered_memory import RegisteredMemory
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.errors import ConfigurationError, DataPlaneError
from shadowserve.keys import KVNamespace, ModelIdentity, prefix_chain, record_keys
from shadowserve.pieces import leading

_PAUSE_S: Final = 0.02
"""Pause between a refusal and the next try: a client without a server does not loop at full speed."""


class Caller:
    """A client of the storage server that uses redis-py and judges every answer. One thread at a time."""

    def __init__(
        self,
        port: int,
        expected: Expected,
        tally: Tally,
        *,
        deadline_s: float = WAIT_MAX_S,
        silence: str = "",
        **options: Any,
    ) -> None:
        """Create a client that connects at its first request, with ``options`` of redis-py.

        ``silence``: reason why an answer may be absent, so that the client's own deadline ends the call. Empty: a
        missing answer is a hang.
        """
        self.expected, self.tally, self.silence = expected, tally, silence
        self._deadline_s = deadline_s
        self.redis = redis.Redis(
            host="127.0.0.1",
            port=port,
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            retry=Retry(NoBackoff(), 0),
            single_connection_client=False,
            **options,
        )

    def close(self) -> None:
        self.redis.close()

    def reconnect(self) -> None:
        self.redis.connection_pool.disconnect()

    def _call(self, what: str, call: Callable[[], Any]) -> tuple[bool, Any]:
        """Return (True, the answer), or (False, None) after an error."""
        began = time.monotonic()
        answered, answer = False, None
        try:
            answered, answer = True, call()
        except redis.exceptions.TimeoutError:
            if not self.silence:
                self.tally.note(Outcome.HANG, f"{what}: no answer in {self._deadline_s:g} s")
                return False, None
            self.tally.note(Outcome.REFUSED, f"{what}: the client's deadline passed: {self.silence}")
        except (redis.exceptions.RedisError, OSError, ValueError) as error:  # ValueError: the answer is not RESP
            self.tally.note(Outcome.REFUSED, f"{what}: {type(error).__name__}: {generic(str(error))}")
            if not isinstance(error, redis.exceptions.ResponseError):
                self.reconnect()
        self.tally.note_late(what, began, self._deadline_s)
        return answered, answer

    def set(self, key: str, **options: Any) -> bool:
        """Store the next version of a key. Return True if the server acknowledged it."""
        return self._set(key, self.expected.begin(key), options)

    def set_to(self, key: str, value: bytes) -> bool:
        """Store a value under a key that never has another value. Return True if the server acknowledged it."""
        return self._set(key, self.expected.begin_with(key, value), {})

    def _set(self, key: str, version: int, options: dict[str, Any]) -> bool:
        value = self.expected.value(key, version)
        answered, _ = self._call("SET", lambda: self.redis.set(key, value, **options))
        if answered:
            self.expected.acknowledged(key, version)
            self.tally.note(Outcome.RIGHT)
        else:
            self.expected.unknown(key)
            if self.silence:
                self.expected.may_come_late(key, version)
        return answered

    def delete(self, key: str) -> bool:
        self.expected.removing(key)
        answered, _ = self._call("DEL", lambda: self.redis.delete(key))
        if answered:
            self.expected.acknowledged(key, ABSENT)
            self.tally.note(Outcome.RIGHT)
        elif self.silence:
            self.expected.may_come_late(key, ABSENT)
        return answered

    def get(self, key: str) -> Outcome:
        answered, value = self._call("GET", lambda: self.redis.get(key))
        if not answered:
            return Outcome.REFUSED
        outcome, reason = self.expected.judge(key, value)
        self.tally.note(outcome, f"GET: {reason}" if reason else "")
        return outcome

    def ping(self) -> bool:
        answered, _ = self._call("PING", self.redis.ping)
        if answered:
            self.tally.note(Outcome.RIGHT)
        return answered

    def verify(self, keys: Sequence[str] | None = None) -> list[str]:
        """Read keys, by default all. Return the keys with a wrong or missing answer."""
        chosen = self.expected.keys if keys is None else keys
        return [key for key in chosen if self.get(key) is not Outcome.RIGHT]

    def step(self, key: str, chance: random.Random) -> None:
        luck = chance.random()
        if luck < 0.5:
            served = self.set(key)
        elif luck < 0.95:
            served = self.get(key) is not Outcome.REFUSED
        else:
            served = self.delete(key)
        if not served:
            time.sleep(_PAUSE_S)


@contextlib.contextmanager
def going_on(tally: Tally, works: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Run each function repeatedly in its own thread until the context ends.

    An exception of a function is raised at the end. A thread that does not end is a hang.
    """
    stopped = threading.Event()
    failures: list[BaseException] = []

    def go_on(work: Callable[[], object]) -> None:
        try:
            while not stopped.is_set():
                work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=go_on, args=[work], daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join(2 * WAIT_MAX_S + BOUND_S)
            if thread.is_alive():
                tally.note(Outcome.HANG, "a client's thread does not end")
    if failures:
        raise failures[0]


def load(callers: Sequence[Caller], keys: Sequence[str], seed: int) -> contextlib.AbstractContextManager[None]:
    """Run callers with random operations in threads, each on its own keys. Stop all threads at the end."""

    def working(number: int, caller: Caller) -> Callable[[], None]:
        own, chance = keys[number :: len(callers)], random.Random(f"{seed}/{number}")
        return lambda: caller.step(chance.choice(own), chance)

    return going_on(callers[0].tally, [working(*pair) for pair in enumerate(callers)])


def generic(text: str) -> str:
    """Return an error's text without ports and addresses, so that equal reasons count as one."""
    words = [word for word in text.replace("\n", " ").split() if not any(letter.isdigit() for letter in word)]
    return " ".join(words)[:120]


# ---- Over a data plane

MODEL: Final = ModelIdentity(model="failures", dtype="bfloat16", chunk_tokens=64)
SHAPE: Final = KVNamespace(model=MODEL, layers=(0, 4), heads=(0, 2)).name(
    ChunkLayout(dtype=DType.BFLOAT16, layers=4, kinds=2, vector_length=64, tokens=64, quantizer=Quantizer.LOSSLESS)
)
"""Bytes of a chunk."""


class Prompt:
    """A chain of chunks and their bytes. The bytes resemble a model's KV, and all chunks have one shape."""

    def __init__(self, seed: str, chunks: int, shape: ChunkLayout = SHAPE, model: ModelIdentity = MODEL) -> None:
        chance = random.Random(seed)
        self.tokens = [chance.randrange(1000) for _ in range(chunks * model.chunk_tokens)]
        chain = prefix_chain(model.digest(), self.tokens, chunk_tokens=model.chunk_tokens)
        self.keys = record_keys(shape.namespace, chain)
        # The exponents are near one another and the fractions are noise, as in KV.
        self.chunks = [_floats(f"{model.model}/{seed}/{number}", shape.raw_bytes) for number in range(chunks)]
        self.parents = [b"", *self.keys[:-1]]


def _floats(seed: str, size: int) -> bytes:
    noise = bytearray(random.Random(seed).randbytes(size))
    noise[1::2] = bytes(0x3F if byte & 1 else 0xBF for byte in noise[1::2])
    return bytes(noise)


class Host:
    """The host's client of a data plane. It judges every answer. One thread at a time.

    All chunks have one shape. With ``plain`` the chunks are stored uncompressed, so that devices can load them into
    pages.
    """

    def __init__(
        self,
        address: str,
        tally: Tally,
        *,
        deadline_s: float = 3.0,
        chunks: int = 8,
        shape: ChunkLayout = SHAPE,
        plain: bool = False,
    ) -> None:
        self.tally, self._deadline_s, self._shape, self._plain = tally, deadline_s, shape, plain
        self.client = DataPlaneClient(address, connect_timeout_s=deadline_s, backoff=0.02, backoff_max_s=0.2)
        self._registration = RegisteredMemory(
            self.client, [shape], chunks * shape.raw_bytes, connect_timeout_s=deadline_s
        )
        self._jobs = 0

    def close(self) -> None:
        """Close the connection without a message, as a lost host does."""
        self._registration.retire(release=False)
        self.client.close()

    def leave(self) -> None:
        """Unregister this host's memory and close the connection."""
        self._registration.close()
        self.client.close()

    def _memory(self) -> memoryview | None:
        try:
            memory = self._registration.acquire(self._deadline_s)
        except (DataPlaneError, ConfigurationError) as error:
            reason = getattr(error, "outcome", "configuration")
            self.tally.note(Outcome.REFUSED, f"register: {reason}")
            time.sleep(_PAUSE_S)
            return None
        found: memoryview = memory.memory
        return found

    def _next_job(self) -> str:
        self._jobs += 1
        return f"{id(self):x}-{self._jobs}"

    def store(self, prompt: Prompt, *, lasts_s: float = 0.0) -> int:
        """Store a prompt's chunks, for ``lasts_s`` if it is not 0. Return the number of acknowledged chunks."""
        memory = self._memory()
        if memory is None:
            return 0
        for number, data in enumerate(prompt.chunks):
            memory[number * len(data) : (number + 1) * len(data)] = data
        began = time.monotonic()
        place = self._registration.memory_id, 0
        keys = prompt.keys, prompt.parents
        answer = self.client.store(
            self._next_job(), *place, *keys, self._deadline_s, lasts_s=lasts_s, plain=self._plain
        )
        self.tally.note_late("store", began, self._deadline_s)
        self._settle(answer.reason, answer.quiet)
        chunks = leading(answer.stored)
        if chunks:
            self.tally.note(Outcome.RIGHT)
        if answer.reason != "complete":
            self.tally.note(Outcome.REFUSED, f"store: {answer.reason}")
        return chunks

    def store_whole(self, prompts: Sequence[Prompt]) -> None:
        """Store prompts, and repeat on slow machines until all chunks are acknowledged."""
        for prompt in prompts:
            wait_for(lambda prompt=prompt: self.store(prompt) == len(prompt.keys))  # type: ignore[misc]

    def fetch(self, prompt: Prompt, *, stored: int = 0, losable: str = "") -> int:
        """Fetch a prompt's chunks and compare each byte. Return the number of chunks that arrived.

        The first ``stored`` chunks were acknowledged: they must be present unless ``losable`` gives a reason.
        """
        memory = self._memory()
        if memory is None:
            return 0
        memory[:] = b"\xee" * len(memory)
        began = time.monotonic()
        try:
            part = FetchPart.whole(self._shape, self._registration.memory_id, prompt.keys)
            call = self.client.start_fetch(self._next_job(), [part], self._deadline_s)
            answer = call.result()
        except DataPlaneError as error:
            self.tally.note(Outcome.REFUSED, f"fetch: {error.outcome}")
            time.sleep(_PAUSE_S)
            return 0
        self.tally.note_late("fetch", began, self._deadline_s)
        size = self._shape.raw_bytes
        (arrived,) = answer.chunks
        found = [bytes(memory[number * size : (number + 1) * size]) for number in range(arrived)]
        lost = answer.reason == "absent" and arrived < stored
        self.tally.note_chunks("fetch", prompt.chunks, found, answer.reason, lost=lost, losable=losable)
        self._settle(answer.reason, answer.quiet)
        return arrived

    def _settle(self, reason: str, quiet: bool) -> None:
        if not quiet or reason == "unknown_memory":
            self._registration.retire(release=not quiet)

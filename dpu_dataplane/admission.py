"""Admission of calls, before their handlers: limits on calls, checks of messages, limits on their bytes.

Calls without a session (Hello, probes, and all others that can connect) share a few places, so that they cannot lock
hosts out. gRPC itself would wait for a message for ever, and log a traceback for each one that does not decode.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from inspect import isasyncgen
from typing import Any, Final, NamedTuple, TypeAlias

import grpc

from dpu_dataplane.log_limiter import LogLimiter, address_of

CALLS_MAX: Final = 1024  # most calls in progress, including waiting ones: three times the default queues
_SHARE_LEAST: Final = 128  # smallest share of a host: an engine's few lookups, fetches and stores
_UNAUTHENTICATED_MAX: Final = 128
"""Most calls without a session; all but health watches end within milliseconds."""
_MESSAGE_S: Final = 20.0  # seconds for the message of a call: enough for the largest one at 4 Mbit/s

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Call: TypeAlias = Callable[[Any, Any], Awaitable[Any]]

logger = logging.getLogger(__name__)


class _Received(NamedTuple):
    """A message, None if it does not decode, and its size."""

    request: Any
    size: int


@dataclass(slots=True)
class _Caller:
    """Calls in progress of a host, or of all unauthenticated clients together."""

    calls: int = 0
    bytes: int = 0


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # at runtime it takes none
    """Interceptor that admits calls; ``owner_of`` returns the host of a call, empty without a session."""

    def __init__(self, bytes_max: int, hosts_max: int, owner_of: Callable[[Any], str], log: LogLimiter) -> None:
        self._bytes_max = bytes_max
        self._bytes_share = bytes_max // hosts_max
        self._calls_share = max(_SHARE_LEAST, (CALLS_MAX - _UNAUTHENTICATED_MAX) // hosts_max)
        self._owner_of = owner_of
        self._log = log
        self._handlers: dict[str, _Handler] = {}
        self._callers: defaultdict[str, _Caller] = defaultdict(_Caller)
        self.total_bytes = 0  # bytes of messages of calls in progress

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        method = handler_call_details.method
        if method not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None:
                return handler
            self._handlers[method] = self._wrap(method, handler)  # one entry for each method
        return self._handlers[method]

    def _wrap(self, method: str, handler: Any) -> _Handler:
        """Return a handler that reads its message itself: on the wire, a stream of one message is the message."""
        decode, streams = handler.request_deserializer, handler.response_streaming
        assert not handler.request_streaming, "no service has such a method"

        def read(data: bytes) -> _Received:
            try:
                return _Received(decode(data), len(data))
            except Exception:  # protobuf's own kinds, by implementation
                return _Received(None, len(data))

        async def stream(request: Any, context: Any) -> None:
            answers = handler.unary_stream(request, context)
            if not isasyncgen(answers):
                await answers
                return
            async for each in answers:
                await context.write(each)

        call = stream if streams else handler.unary_unary

        async def behavior(_: Any, context: Any) -> Any:
            return await self._admit(method, context, call)

        make: Any = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        made: _Handler = make(behavior, read, handler.response_serializer)
        return made

    async def _admit(self, method: str, context: Any, call: _Call) -> Any:
        name = self._owner_of(context)
        caller = self._callers[name]
        if caller.calls >= (self._calls_share if name else _UNAUTHENTICATED_MAX):
            whose = "of this host" if name else "without a session"
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{caller.calls} calls {whose} are in progress, the limit; treat it as a miss",
            )
        caller.calls += 1
        size = 0
        try:
            received = await self._receive(method, context)
            size = await self._count(received.size, caller, context)
            return await self._handle(method, received.request, context, call)
        finally:
            self.total_bytes -= size
            caller.bytes -= size
            caller.calls -= 1
            if not caller.calls:
                del self._callers[name]

    async def _receive(self, method: str, context: Any) -> _Received:
        try:
            async with asyncio.timeout(_MESSAGE_S):
                received = await context.read()
        except TimeoutError:
            problem = f"the message of a call of {method} did not arrive within {_MESSAGE_S:g} s"
            self._log.log(logging.WARNING, f"{method}: late", address_of(context.peer()), problem)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, problem)
        if isinstance(received, _Received) and received.request is not None:
            return received
        size = received.size if isinstance(received, _Received) else 0  # else it was the end of the stream
        problem = f"{method} was sent {size} bytes that are not its message; does the other side run another release?"
        self._log.log(logging.WARNING, f"{method}: no message", address_of(context.peer()), problem)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        raise AssertionError("abort() always raises")

    async def _count(self, size: int, caller: _Caller, context: Any) -> int:
        if self.total_bytes + size > self._bytes_max or (caller.bytes and caller.bytes + size > self._bytes_share):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"calls in progress have {caller.bytes} bytes of this host, {self.total_bytes} in all, this {size}: "
                f"more than call_bytes_max allows ({self._bytes_max}, in equal shares); treat it as a miss",
            )
        self.total_bytes += size
        caller.bytes += size
        return size

    async def _handle(self, method: str, request: Any, context: Any, call: _Call) -> Any:
        try:
            return await call(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            text = f"a bug in {method}, please report it: {type(error).__name__}: {error}"
            if self._log.log(logging.ERROR, f"{method}: {type(error).__name__}", "", text):
                logger.exception("traceback")
            await context.abort(grpc.StatusCode.INTERNAL, text)

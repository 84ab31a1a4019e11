"""What every call goes through before its handler, of whatever service: its message is read, and its bytes are counted.

A message that does not decode is the caller's fault, told by a status and a counted line; gRPC itself would answer
UNKNOWN and log a traceback for each. So would it for a handler's bug, which callers that have found it repeat at will.
"""

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable
from inspect import isasyncgen
from typing import Any, NamedTuple, TypeAlias

import grpc

from dpu_dataplane.repeats import Repeats, address_of
from shadowserve.proto import SESSION_KEY

__all__ = ["Admission"]

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

logger = logging.getLogger(__name__)


class _Received(NamedTuple):
    """A message, None where the bytes are none."""

    request: Any
    size: int


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # at runtime it takes none
    """Lets calls in.

    Args:
        bytes_max: of the messages of calls in progress.
        callers_max: that share them, equally; one call each may have in any case.
        repeats: tells what callers did wrong.
    """

    def __init__(self, bytes_max: int, callers_max: int, repeats: Repeats) -> None:
        self._bytes_max = bytes_max
        self._share = bytes_max // callers_max
        self._repeats = repeats
        self._handlers: dict[str, _Handler] = {}
        self._bytes: defaultdict[bytes, int] = defaultdict(int)  # of each session's calls in progress
        self.total_bytes = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Return the method's handler behind what is done here; None, as it is, for a method that there is not."""
        method = handler_call_details.method
        if method not in self._handlers:
            handler = await continuation(handler_call_details)
            if handler is None:
                return handler
            self._handlers[method] = self._wrap(method, handler)  # as many as there are methods
        return self._handlers[method]

    def _wrap(self, method: str, handler: Any) -> _Handler:
        decode = handler.request_deserializer

        def read(data: bytes) -> _Received:
            try:
                return _Received(decode(data), len(data))
            except Exception:  # protobuf's own kinds, by implementation
                return _Received(None, len(data))

        async def answer(received: _Received, context: Any) -> Any:
            return await self._let_in(method, received, context, handler.unary_unary)

        async def answers(received: _Received, context: Any) -> None:
            async def call(request: Any, context: Any) -> None:
                stream = handler.unary_stream(request, context)
                if not isasyncgen(stream):
                    await stream
                    return
                async for each in stream:
                    await context.write(each)

            await self._let_in(method, received, context, call)

        streams = handler.response_streaming
        make: Any = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        made: _Handler = make(answers if streams else answer, read, handler.response_serializer)
        return made

    async def _let_in(
        self, method: str, received: _Received, context: Any, call: Callable[[Any, Any], Awaitable[Any]]
    ) -> Any:
        size, caller = received.size, _session(context)
        if received.request is None:
            problem = f"{method} was sent {size} bytes that are no message of it; is the other side of another release?"
            self._repeats.tell(logging.WARNING, f"{method}: no message", address_of(context.peer()), problem)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        mine = self._bytes.get(caller, 0)
        if self.total_bytes + size > self._bytes_max or (mine and mine + size > self._share):
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"calls in progress have {mine} bytes of this host, {self.total_bytes} in all, this one {size}: more "
                f"than call_bytes_max allows ({self._bytes_max}, in equal shares); treat it as a miss",
            )
        self.total_bytes += size
        self._bytes[caller] += size
        try:
            return await call(received.request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            told = f"{method} met a bug, please report it: {type(error).__name__}: {error}"
            if self._repeats.tell(logging.ERROR, f"{method}: {type(error).__name__}", "", told):
                logger.exception("where it is")
            await context.abort(grpc.StatusCode.INTERNAL, told)
        finally:
            self.total_bytes -= size
            self._bytes[caller] -= size
            if not self._bytes[caller]:
                del self._bytes[caller]


def _session(context: Any) -> bytes:
    """Return what the call says it is of; one that is of nobody does not get far enough to hold much."""
    value = next((value for key, value in context.invocation_metadata() or () if key == SESSION_KEY), b"")
    return value if isinstance(value, bytes) else b""

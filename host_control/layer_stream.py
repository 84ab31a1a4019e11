"""A call that tells how many layers are in place before it answers."""

import threading
from collections.abc import Callable
from typing import Any

import grpc

from shadowserve.proto import dataplane_pb2 as pb


class LayerStream:
    """A FetchLayers call in flight, whose messages tell its progress. Its answer comes like that of any other call.

    The call's own deadline bounds it; a thread reads it.

    Args:
        call: Iterator over the data plane's messages.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._changed = threading.Condition()
        self._layers = 0
        self._answer = pb.FetchResponse()  # with no outcome
        self._error: grpc.RpcError | None = None
        self._ended = False
        self._callbacks: list[Callable[[Any], None]] = []
        threading.Thread(target=self._read, name="shadowserve-layers", daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self._call:
                if message.HasField("answer"):
                    self._answer = message.answer
                with self._changed:
                    self._layers = max(self._layers, message.layers)
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            for callback in self._callbacks:
                callback(self)

    def layers(self, seen: int, seconds: float) -> int:
        """Return the number of leading layers in place, once above ``seen``, or the call or the seconds end."""
        with self._changed:
            self._changed.wait_for(lambda: self._layers > seen or self._ended, seconds)
            return self._layers

    def done(self) -> bool:
        """Tell if the call has ended."""
        return self._ended

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call a function, in any thread, once the call has ended; at once if it has."""
        with self._changed:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback(self)

    def result(self) -> pb.FetchResponse:
        """Return the answer, with no outcome where none came.

        Raises:
            grpc.RpcError: The call has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
        if self._error is not None:
            raise self._error
        return self._answer

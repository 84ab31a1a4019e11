"""A call that says how far the layers of a fetch are before it answers, for memory in which no word can say it."""

import threading
from collections.abc import Callable
from typing import Any

import grpc

from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["LayerStream"]


class LayerStream:
    """A FetchLayers call on its way, of which the answer comes like that of any other call.

    What was said holds, whatever the answer; the call's own deadline bounds it, and a thread reads it.

    Args:
        call: yields what the data plane says.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._changed = threading.Condition()
        self._layers = 0
        self._answer = pb.FetchResponse()  # of no outcome
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
        """Wait, where so many leading layers are ``seen``, until there are more or the call ends; return how many."""
        with self._changed:
            self._changed.wait_for(lambda: self._layers > seen or self._ended, seconds)
            return self._layers

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self._ended

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have this called, in any thread, once the call has ended; at once if it has."""
        with self._changed:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback(self)

    def result(self) -> pb.FetchResponse:
        """Return the answer, of no outcome where none came.

        Raises:
            grpc.RpcError: the call has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
        if self._error is not None:
            raise self._error
        return self._answer

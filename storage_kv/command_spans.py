"""Spans of the commands that follow KV.TRACE: one from a command to the end of all replies, not one for each."""

from collections.abc import Callable

from shadowserve import spans
from storage_kv.reply import Reply


class CommandSpans:
    """The commands of one connection that belong to a span of the client, by its context. Used by its thread.

    ``count``: number of commands; negative for all until the next KV.TRACE.
    """

    __slots__ = ("_commands", "_context", "_counts", "_left", "_span")

    def __init__(self, context: str, count: int) -> None:
        self._context, self._left = context, count
        self._span: spans.Span | None = None
        self._commands = 0
        self._counts = False  # the command that runs, with all its steps, belongs to the span

    def run(self, name: str, step: Callable[[], Reply], *, begins: bool) -> Reply:
        """Run a command, or continue it, within the span."""
        if begins:
            self._counts = bool(self._left) and name != "kv.trace"
            if not self._counts:
                self.end()
                return step()
            self._left -= 1
            self._commands += 1
        elif not self._counts:
            return step()
        if self._span is None:
            self._span = spans.begin(f"storage.{name}", self._context, kind="server")
        with spans.use(self._span.context):
            return step()

    def end(self) -> None:
        if self._span is not None:
            self._span.end(commands=self._commands)
            self._span, self._commands = None, 0

"""Log lines of the daemons: text, or one JSON object per line.

Programs log an event with its name and fields, ``_log.info("client_denied address=%s:%d reason=%r", host, port, why)``,
or a sentence. Both formats have the same events and fields; JSON keeps numbers as numbers. Fields come from the
template, never from the formatted text, so a client's input adds neither fields nor lines.
"""

import json
import logging
import re
import sys
import time
from typing import Any, Final, Literal, TextIO, TypeAlias

LogFormat: TypeAlias = Literal["text", "json"]

_EVENT: Final = re.compile(r"([a-z][a-z0-9_]*)((?: [a-z][a-z0-9_]*=(?:'[^']*'|\S+))*)")
_FIELD: Final = re.compile(r" ([a-z][a-z0-9_]*)=('[^']*'|\S+)")
_SPECIFIER: Final = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[sdrxXgGeEfFiuoac])")
_CONTROLS: Final = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that break a line, control a terminal or reverse text: C0, C1, separators, bidirectional overrides."""
_ESCAPES: Final = {code: repr(chr(code))[1:-1] for code in _CONTROLS if chr(code) != "\t"}
_OURS: Final = frozenset({"time", "level", "logger", "event", "message", "exception"})


class TextFormatter(logging.Formatter):
    """``2026-11-21T15:08:13.042 INFO storage_kv.server ready address=127.0.0.1:6380``, in local time."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the message as one line; control characters are escaped."""
        return super().formatMessage(record).translate(_ESCAPES)


class JsonFormatter(logging.Formatter):
    """One object per line: ``time`` (UTC), ``level``, ``logger``, then ``event`` and its fields, or a ``message``."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
        }
        found = fields_of(record)
        if found is None:
            line["message"] = record.getMessage()
        else:
            line["event"], fields = found
            line |= {f"{name}_" if name in _OURS else name: value for name, value in fields.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def fields_of(record: logging.LogRecord) -> tuple[str, dict[str, Any]] | None:
    """Return the event's name and fields; None if the record is a sentence."""
    template = record.msg
    match = _EVENT.fullmatch(template) if isinstance(template, str) else None
    if match is None:
        return None
    arguments = list(record.args) if isinstance(record.args, tuple) else []
    fields: dict[str, Any] = {}
    for name, text in _FIELD.findall(match[2]):
        specifiers = [found for found in _SPECIFIER.findall(text) if found != "%%"]
        taken, arguments = arguments[: len(specifiers)], arguments[len(specifiers) :]
        if [text] == specifiers and taken:
            value = taken[0]
            fields[name] = value if isinstance(value, bool | int | float) or value is None else str(value)
        else:
            fields[name] = (text % tuple(taken) if taken else text).strip("'")
    return match[1], fields


def configure_logging(level: str, form: LogFormat, stream: TextIO | None = None) -> None:
    """Write all log lines of this process to ``stream``, by default standard error, from ``level`` on."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())

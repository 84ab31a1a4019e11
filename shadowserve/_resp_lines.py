"""Lines of text sent to a server: the few commands that may be typed, and other protocols."""

import re
from typing import Final

TYPED_COMMANDS: Final = frozenset({b"AUTH", b"ECHO", b"INFO", b"PING", b"QUIT"})
"""Commands that are accepted as a line of text, for probes and people. None of them reads or changes a key: other
protocols are lines of text too, and an attacker may be able to make another program, such as a browser, send one."""

_TYPED: Final = "AUTH, ECHO, INFO, PING and QUIT"
_TLS_HANDSHAKE: Final = 0x16  # the first byte of a TLS client
_TEXT: Final = frozenset(b"\r\n\t" + bytes(range(0x20, 0x7F)))
_HTTP: Final = re.compile(
    rb"(?:GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH|TRACE|CONNECT|PRI)[ \t]+(?:[/*]|https?:)"  # a request, HTTP/0.9 too
    rb"|[^\r\n]*[ \t]HTTP/[0-9]"  # of any method
    rb"|[A-Z][A-Z0-9-]*:(?:[ \t]|\r?\n)",  # a header
    re.IGNORECASE,
)


def protocol_of(line: bytes) -> str:
    """Return the protocol, ``HTTP`` or ``TLS``, of a line or its beginning; empty for others."""
    return "TLS" if line[0] == _TLS_HANDSHAKE else "HTTP" if _HTTP.match(line) else ""


def refusal_of(line: bytes, bytes_max: int) -> str | None:
    """Return why a line or its beginning cannot be a typed command; None if it can."""
    if line[0] not in _TEXT:
        return f"no command begins with the byte 0x{line[0]:02x}"
    if len(line) > bytes_max + 1:
        return "too big inline request"
    name = b"".join(line.split(None, 1)[:1]).upper()
    if line.endswith(b"\n") and name and name not in TYPED_COMMANDS:
        shown = name[:32].decode("ascii", "replace")
        return f"{shown!r} cannot be typed: only {_TYPED} are accepted as text; send RESP"
    return None


_BLANKS: Final = b" \t\n\v\f\r\0"
_ESCAPES: Final = {0x6E: b"\n", 0x72: b"\r", 0x74: b"\t", 0x62: b"\b", 0x61: b"\a"}
_HEX_ESCAPE: Final = re.compile(rb"\\x([0-9a-fA-F]{2})")


def split_inline(line: bytes) -> list[bytes] | None:
    r"""Split an inline request as Redis does: blanks separate, ``"..."`` with escapes and ``'...'`` keep together.

    Returns None where a quote does not close, or closes in the middle of a word.
    """
    words: list[bytes] = []
    position = 0
    while True:
        while position < len(line) and line[position] in _BLANKS:
            position += 1
        if position >= len(line):
            return words
        word = bytearray()
        while position < len(line) and line[position] not in _BLANKS:
            character = line[position]
            if character in (0x22, 0x27):
                closing = _unquote(line, position, word)
                if closing is None or (closing < len(line) and line[closing] not in _BLANKS):
                    return None
                position = closing
            else:
                word.append(character)
                position += 1
        words.append(bytes(word))


def _unquote(line: bytes, position: int, word: bytearray) -> int | None:
    """Append the quoted part at ``position`` to ``word``; return its end, or None if the quote does not close."""
    quote = line[position]
    position += 1
    while position < len(line):
        character = line[position]
        if character == quote:
            return position + 1
        if character == 0x5C and quote == 0x22:  # a backslash in double quotes
            escape = _HEX_ESCAPE.match(line, position)
            if escape:
                word.append(int(escape[1], 16))
                position += 4
                continue
            if position + 1 < len(line):
                word += _ESCAPES.get(line[position + 1], line[position + 1 : position + 2])
                position += 2
                continue
        elif character == 0x5C and line[position + 1 : position + 2] == b"'":
            word.append(0x27)
            position += 2
            continue
        word.append(character)
        position += 1
    return None

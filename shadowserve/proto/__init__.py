"""Generated gRPC stubs (``scripts/gen-proto``), and what their messages are sent with."""

from typing import Final

PROTOCOL_VERSION: Final = 8
"""Sent in HelloRequest. Raised when a message or its meaning changes incompatibly."""

SESSION_KEY: Final = "shadowserve-session-bin"
"""Metadata of a call: the session that HelloResponse named."""

HELLO_KEY: Final = "shadowserve-hello"
"""Trailing metadata of a call that was refused because the daemon does not know its session."""

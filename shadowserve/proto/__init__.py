"""Generated gRPC stubs (``scripts/gen-proto``), and the version of the protocol they speak."""

from typing import Final

__all__ = ["PROTOCOL_VERSION"]

PROTOCOL_VERSION: Final = 1
"""Sent in RegisterDestinationRequest. Raised when a message or its meaning changes incompatibly."""

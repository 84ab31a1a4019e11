"""Notifications to systemd: ready, reloading, stopping, alive. Without systemd they do nothing."""

import os
import socket
from typing import Final

_TIMEOUT_S: Final = 1.0


def notify(*states: str) -> bool:
    """Send states such as ``READY=1`` or ``STATUS=draining``; return True if they were sent.

    Errors are ignored: systemd's time limits report a missing notification.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.settimeout(_TIMEOUT_S)
            channel.connect("\0" + path[1:] if path[0] == "@" else path)
            channel.sendall("\n".join(states).encode())
    except OSError:
        return False
    return True


def watchdog_interval_s() -> float | None:
    """Return the interval of ``WATCHDOG=1`` in seconds, half of WatchdogSec; None without a watchdog."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    try:
        microseconds = int(os.environ.get("WATCHDOG_USEC", "0"))
    except ValueError:
        return None
    return microseconds / 2e6 if microseconds > 0 else None

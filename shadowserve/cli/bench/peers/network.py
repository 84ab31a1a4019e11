"""Where stores listen and clients connect from: loopback, or two network namespaces with a limited link between.

Namespaces are kept by open files only, never by names: whatever ends this process, the kernel removes them with all
their devices once the last process in them is gone.
"""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from shadowserve.errors import ShadowServeError

__all__ = ["LOOPBACK", "Link", "Network", "linked"]

_CLONE_NEWNET: Final = 0x40000000
_STORE_ADDRESS: Final = "10.213.7.1"
_CLIENT_ADDRESS: Final = "10.213.7.2"
_HELP: Final = (
    "bench link makes two network namespaces with a rate-limited link between them, for which it needs CAP_SYS_ADMIN "
    "and CAP_NET_ADMIN: run it as root, in a container started with '--cap-add SYS_ADMIN --cap-add NET_ADMIN', or as "
    "'unshare --user --map-root-user --net shadowserve bench link'"
)


@dataclass(frozen=True)
class Network:
    """Two ends.

    Attributes:
        host: address that stores listen on.
        store_side: entered by a thread that starts a store: processes and sockets it makes there belong to that end.
        client_side: the same for clients.
    """

    host: str = "127.0.0.1"
    store_side: Callable[[], AbstractContextManager[None]] = nullcontext
    client_side: Callable[[], AbstractContextManager[None]] = nullcontext


LOOPBACK: Final = Network()


class Link(Network):
    """A network whose direction from the stores to the clients has a limited rate."""

    def limit(self, gbit_per_s: float) -> None:
        """Set the rate, of Ethernet frames: 95.7 % of it is left for what TCP carries."""
        # The burst is as large as it can be without a short transfer passing the limit unseen, and the queue holds
        # 20 ms: what a switch port has.
        rate, burst = f"{round(gbit_per_s * 1000)}mbit", "256kb"
        with self.store_side():
            _run(
                "tc", "qdisc", "replace", "dev", "store", "root", "tbf", "rate", rate, "burst", burst, "latency", "20ms"
            )


@contextlib.contextmanager
def linked() -> Iterator[Link]:
    """Make two namespaces and a link between them while the context lasts.

    Raises:
        ShadowServeError: this process may not, or the tools (iproute2) or the kernel's modules are missing.
    """
    try:
        store, client = _Namespace(), _Namespace()
    except PermissionError as error:
        raise ShadowServeError(f"cannot make a network namespace ({error.strerror}); {_HELP}") from error
    with contextlib.closing(store), contextlib.closing(client):
        with store.entered():
            _run("ip", "link", "add", "store", "type", "veth", "peer", "name", "client", "netns", client.path)
            _up("store", _STORE_ADDRESS)
        with client.entered():
            _up("client", _CLIENT_ADDRESS)
        yield Link(_STORE_ADDRESS, store.entered, client.entered)


def _up(device: str, address: str) -> None:
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", f"{address}/24", "dev", device)
    _run("ip", "link", "set", device, "up")


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        raise ShadowServeError(f"{command[0]} is not installed; it comes with iproute2") from error
    if done.returncode:
        detail = (done.stderr or done.stdout).strip()
        raise ShadowServeError(f"'{' '.join(command)}' failed ({detail}); {_HELP}")


class _Namespace:
    """A network namespace that lives as long as this object, or a process or socket in it."""

    def __init__(self) -> None:
        with _restored():
            _call("unshare", _CLONE_NEWNET)
            self._descriptor = _current()

    @property
    def path(self) -> str:
        """A name by which other processes can reach it while this object is open."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread in the namespace while the context lasts, with every process and socket that it makes."""
        with _restored():
            _call("setns", self._descriptor, _CLONE_NEWNET)
            yield

    def close(self) -> None:
        """Let go."""
        os.close(self._descriptor)


def _current() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    before = _current()
    try:
        yield
    finally:
        _call("setns", before, _CLONE_NEWNET)
        os.close(before)


def _call(function: str, *arguments: int) -> None:
    """Call a function of the C library that Python 3.11 does not wrap; raise OSError where it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), function)

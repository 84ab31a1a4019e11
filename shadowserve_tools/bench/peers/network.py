"""Addresses of stores and clients: loopback, or network namespaces with links between them.

Open files keep the namespaces, never names: when this process ends, the kernel removes them with all their devices.
"""

import contextlib
import ctypes
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from shadowserve.errors import ShadowServeError

TCP_SHARE: Final = 0.957
"""Part of a link's rate that TCP carries."""
_CLONE_NEWNET: Final = 0x40000000
_STORE_ADDRESS: Final = "10.213.{}.1"
_CLIENT_ADDRESS: Final = "10.213.{}.2"
_HELP: Final = (
    "network namespaces with a link between them need CAP_SYS_ADMIN and CAP_NET_ADMIN: run it as root, in a container "
    "started with '--cap-add SYS_ADMIN --cap-add NET_ADMIN', or under 'unshare --user --map-root-user --net'"
)


@dataclass(frozen=True)
class Network:
    """Two ends.

    Attributes:
        host: Address that stores listen on.
        store_side: Context of a thread that starts a store: its processes and sockets belong to that end.
        client_side: The same for clients.
    """

    host: str = "127.0.0.1"
    store_side: Callable[[], AbstractContextManager[None]] = nullcontext
    client_side: Callable[[], AbstractContextManager[None]] = nullcontext


LOOPBACK: Final = Network()


@dataclass(frozen=True)
class Link(Network):
    """Links that each have a limited rate in the direction from the stores to the clients.

    Attributes:
        hosts: Address of each link's store side; ``host`` is the first.
    """

    hosts: Sequence[str] = ()

    def limit(self, gbit_per_s: float, *numbers: int) -> None:
        """Set the rate of the given links, or of all, in Ethernet frames. TCP carries ``TCP_SHARE`` of it."""
        for number in numbers or range(len(self.hosts)):
            self._limit(gbit_per_s, f"store{number}", "root")

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each link has carried from the stores."""
        with self.store_side():
            links = {each["ifname"]: each for each in json.loads(run("ip", "-json", "-stats", "link", "show"))}
        return [links[f"store{number}"]["stats64"]["tx"]["bytes"] for number in range(len(self.hosts))]

    def shape_server(self, port: int) -> None:
        """Prepare :meth:`limit_server` for a server on loopback of the stores' side, such as a bucket."""
        with self.store_side():
            # Packets of 64 KiB would fill a queue of 20 ms with a few of them, and starve single connections.
            run("ip", "link", "set", "dev", "lo", "mtu", "9000", "gso_max_segs", "1")
            run("tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb")
            run("tc", "class", "add", "dev", "lo", "parent", "1:", "classid", "1:1", "htb", "rate", "100gbit")
            run(
                "tc", "filter", "add", "dev", "lo", "parent", "1:", "protocol", "ip",
                "u32", "match", "ip", "sport", str(port), "0xffff", "flowid", "1:1",
            )  # fmt: skip

    def limit_server(self, gbit_per_s: float) -> None:
        """Set the rate of what the server sends; other traffic, such as to its own disks, has no limit."""
        self._limit(gbit_per_s, "lo", "parent", "1:1")

    def _limit(self, gbit_per_s: float, device: str, *where: str) -> None:
        # The burst is the largest that does not let a short transfer exceed the limit. The queue holds 20 ms, like that
        # of a switch port.
        rate, burst = f"{round(gbit_per_s * 1000)}mbit", "256kb"
        shape = "tbf", "rate", rate, "burst", burst, "latency", "20ms"
        with self.store_side():
            run("tc", "qdisc", "replace", "dev", device, *where, *shape)


@contextlib.contextmanager
def linked(links: int = 1) -> Iterator[Link]:
    """Make two namespaces and links between them while the context lasts."""
    with contextlib.closing(Namespace()) as store, contextlib.closing(Namespace()) as client:
        hosts = [_STORE_ADDRESS.format(number) for number in range(links)]
        for number, host in enumerate(hosts):
            join((store, f"store{number}", host), (client, f"client{number}", _CLIENT_ADDRESS.format(number)))
        yield Link(hosts[0], store.entered, client.entered, hosts)


def join(*ends: "tuple[Namespace, str, str]") -> None:
    """Make a link between two namespaces: for each end the namespace, the device's name and its address (/24)."""
    (near, near_device, _), (far, far_device, _) = ends
    with near.entered():
        run("ip", "link", "add", near_device, "type", "veth", "peer", "name", far_device, "netns", far.path)
    for namespace, device, address in ends:
        with namespace.entered():
            run("ip", "link", "set", "lo", "up")
            run("ip", "address", "add", f"{address}/24", "dev", device)
            run("ip", "link", "set", device, "up")


def run(*command: str) -> str:
    """Run a program of iproute2 in this thread's namespace; return its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        raise ShadowServeError(f"{command[0]} is not installed; it comes with iproute2") from error
    if done.returncode:
        detail = (done.stderr or done.stdout).strip()
        raise ShadowServeError(f"'{' '.join(command)}' failed ({detail}); {_HELP}")
    return done.stdout


class Namespace:
    """A network namespace that lives as long as this object, or a process or socket in it."""

    def __init__(self) -> None:
        try:
            with _restored():
                _call("unshare", _CLONE_NEWNET)
                self._descriptor = _current()
        except PermissionError as error:
            raise ShadowServeError(f"cannot make a network namespace ({error.strerror}); {_HELP}") from error

    @property
    def path(self) -> str:
        """Path by which other processes reach it while this object is open."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the namespace in this thread while the context lasts, with all processes and sockets that start in
        it.
        """
        with _restored():
            _call("setns", self._descriptor, _CLONE_NEWNET)
            yield

    def close(self) -> None:
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
    """Call a function of the C library that Python 3.11 lacks; raise OSError if it fails."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), function)

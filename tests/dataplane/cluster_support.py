"""A real cluster for the tests: redis-server processes, or another server, on free ports."""

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataplane_support import SMALL_BUFFERS, Server
from machine import NEVER_MS, WAIT_MAX_MS, WAIT_MAX_S, free_port, wait_for
from redis import Redis
from redis.crc import key_slot
from redis.exceptions import ConnectionError as Lost
from redis.exceptions import RedisError

from dpu_dataplane.config import DataPlaneConfig
from shadowserve.keys import storage_key

PASSWORD = "cluster-secret"
SERVER = os.environ.get("SHADOWSERVE_CLUSTER_SERVER") or shutil.which("redis-server") or "redis-server"
"""Program of the nodes. SHADOWSERVE_CLUSTER_SERVER names another one, such as a valkey-server."""
NODE_TIMEOUT_MS = 2000
"""Time after which nodes treat a node as failed. It also determines how fast nodes receive news of each other."""
BUS = 10_000
"""Offset of a node's cluster bus port from its port."""


def free_pair(taken: Sequence[int]) -> int:
    """Return a free port whose bus port is free, too."""
    while True:
        port = free_port()
        if port + BUS > 32_767 or port in taken or any(abs(port - other) == BUS for other in taken):
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + BUS))
            except OSError:
                continue
        return port


class ClusterNode(Server):
    """One node as a process."""

    def __init__(self, port: int, directory: Path, options: Sequence[str], certificates: Path | None) -> None:
        super().__init__("redis", directory, password=PASSWORD, options=tuple(options))
        self.port = port
        self._tls = certificates is not None
        files = {"ssl": True, "ssl_ca_certs": str(certificates / "ca.crt")} if certificates else {}
        self.redis: Any = Redis(port=port, host="127.0.0.1", password=PASSWORD, socket_timeout=WAIT_MAX_S, **files)

    def start(self) -> "ClusterNode":
        command = [SERVER, "--tls-port" if self._tls else "--port", str(self.port)]
        command += ["--bind", "127.0.0.1", "--dir", str(self.directory), *(["--port", "0"] if self._tls else [])]
        command += ["--cluster-enabled", "yes", "--save", "", "--appendonly", "no"]
        command += ["--requirepass", PASSWORD, "--masterauth", PASSWORD, *self.options]
        with open(self.directory / "node.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(self._answers)
        return self

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, (self.directory / "node.log").read_text()
        try:
            return bool(self.redis.ping())
        except (Lost, RedisError):
            return False

    @property
    def id(self) -> str:
        return str(self.redis.execute_command("CLUSTER MYID").decode())

    def slots(self) -> list[Any]:
        """Return the ranges of slots with their nodes, as this node knows them."""
        return list(self.redis.execute_command("CLUSTER SLOTS", NEVER_DECODE=True))

    def epoch(self, which: str) -> int:
        return int(self.redis.cluster("INFO")[f"cluster_{which}_epoch"])

    def kill(self) -> None:
        self.redis.close()
        super().kill()


class Cluster:
    """Masters with the same number of replicas each, and all slots covered."""

    def __init__(
        self,
        directory: Path,
        *,
        masters: int = 3,
        replicas: int = 1,
        options: Sequence[str] = (),
        certificates: Path | None = None,
    ) -> None:
        self._flags: list[str] = []
        if certificates is not None:
            self._flags = ["--tls", "--cacert", str(certificates / "ca.crt")]
            files = {"cert": "server.crt", "key": "server.key", "ca-cert": "ca.crt"}
            files |= {"client-cert": "client.crt", "client-key": "client.key"}  # for connections between nodes
            options = [
                word for name, file in files.items() for word in (f"--tls-{name}-file", str(certificates / file))
            ]
            options += ["--tls-cluster", "yes", "--tls-replication", "yes", "--tls-auth-clients", "no"]
        options = ["--cluster-node-timeout", str(NODE_TIMEOUT_MS), *options]
        self.nodes: list[ClusterNode] = []
        for number in range(masters * (1 + replicas)):
            folder = directory / str(number)
            folder.mkdir()
            port = free_pair([node.port for node in self.nodes])
            self.nodes.append(ClusterNode(port, folder, options, certificates))
        self._replicas = replicas
        self._homes: dict[int, ClusterNode] = {}

    def start(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.kill()
            raise
        return self

    def _start(self) -> None:
        for node in self.nodes:
            node.start()
        command = ["redis-cli", "-a", PASSWORD, "--no-auth-warning", *self._flags, "--cluster", "create"]
        command += [node.address for node in self.nodes]
        command += ["--cluster-replicas", str(self._replicas), "--cluster-yes"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_MAX_S)
        assert done.returncode == 0, done.stdout + done.stderr
        for node in self.nodes:
            wait_for(lambda node=node: node.redis.cluster("INFO").get("cluster_state") == "ok")
        for node in self.masters():  # clients see a replica after its first write
            own = next(each for each in node.slots() if each[2][1] == node.port)
            name = next(b"warm:%d" % n for n in range(1 << 20) if own[0] <= key_slot(b"warm:%d" % n) <= own[1])
            node.redis.set(name, b"")
        wait_for(self.is_whole)
        self._homes = self._owners()

    def __enter__(self) -> "Cluster":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def never_fail_over(self) -> None:
        """Prevent failovers: a stopped node must not count as failed."""
        for node in self.nodes:
            node.redis.config_set("cluster-node-timeout", NEVER_MS)

    def is_whole(self) -> bool:
        """Return True if every node sees all slots served, and every replica follows its master."""
        return all(
            node.redis.cluster("INFO").get("cluster_state") == "ok"
            and all(len(each) == 3 + self._replicas for each in node.slots())
            and node.redis.info("replication").get("master_link_status", "up") == "up"
            for node in self.nodes
            if node.process is not None
        )

    def masters(self) -> list[ClusterNode]:
        return [node for node in self.nodes if node.process and node.redis.info("replication")["role"] == "master"]

    def replicas(self) -> list[ClusterNode]:
        return [node for node in self.nodes if node.process and node.redis.info("replication")["role"] == "slave"]

    def master_of(self, key: bytes) -> ClusterNode:
        """Return the node that owns a chunk's slot, in the nodes' own view."""
        return self._owners()[slot_of(key)]

    def _owners(self) -> dict[int, ClusterNode]:
        """Return the node that owns each slot, in the first master's view."""
        owners: dict[int, ClusterNode] = {}
        for begin, end, master, *_ in self.masters()[0].slots():
            owners |= dict.fromkeys(range(begin, end + 1), self.at(int(master[1])))
        return owners

    def bring_home(self, keys: Sequence[bytes]) -> None:
        """Move slots back to their first masters: tests leave them anywhere, and some masters without slots."""
        owners = self._owners()
        away = [slot for slot in {slot_of(key) for key in keys} if owners[slot] is not self._homes[slot]]
        for slot in away:
            self.move(slot, owners[slot], self._homes[slot])
        for slot in away:
            wait_for(lambda slot=slot: self.all_know(slot, self._homes[slot]))

    def at(self, port: int) -> ClusterNode:
        return next(node for node in self.nodes if node.port == port)

    def all_know(self, slot: int, master: ClusterNode) -> bool:
        """Return True if every node knows the master of a slot: a client may request the map from any of them."""
        return all(
            any(begin <= slot <= end and first[1] == master.port for begin, end, first, *_ in node.slots())
            for node in self.nodes
            if node.process is not None
        )

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value under a chunk's key over any other value, and wait for the replicas."""
        master = self.master_of(key)
        assert master.redis.set(storage_key(key), value)
        if self._replicas:
            master.redis.execute_command("WAIT", self._replicas, WAIT_MAX_MS)

    def clear(self) -> None:
        for node in self.masters():
            node.redis.flushall()

    # ---- Migrating slots

    def begin_to_move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        target.redis.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source.id)
        source.redis.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target.id)

    def move_keys(self, slot: int, source: ClusterNode, target: ClusterNode) -> int:
        names = source.redis.execute_command("CLUSTER GETKEYSINSLOT", slot, 1000)
        for name in names:
            source.redis.execute_command(
                "MIGRATE", "127.0.0.1", target.port, name, 0, WAIT_MAX_MS, "REPLACE", "AUTH", PASSWORD
            )
        return len(names)

    def end_move(self, slot: int, target: ClusterNode) -> None:
        # Its claim must be newer than all other claims; otherwise the nodes return to the source's claim.
        newest = max(node.epoch("my") for node in self.masters())
        wait_for(lambda: target.epoch("current") >= newest)
        for node in [target, *(node for node in self.masters() if node is not target)]:
            node.redis.execute_command("CLUSTER SETSLOT", slot, "NODE", target.id)

    def move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        self.begin_to_move(slot, source, target)
        self.move_keys(slot, source, target)
        self.end_move(slot, target)

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()


def slot_of(key: bytes) -> int:
    return int(key_slot(storage_key(key)))


def cluster_config(cluster: "Cluster | Sequence[str]", **changes: Any) -> DataPlaneConfig:
    """A configuration of a daemon with the addresses of two nodes."""
    addresses = [node.address for node in cluster.nodes[:2]] if isinstance(cluster, Cluster) else list(cluster)
    values: dict[str, Any] = {"listen": "127.0.0.1:0", "storage_cluster": addresses, "storage_password": PASSWORD}
    values |= {"connect_timeout_s": WAIT_MAX_S, "command_timeout_s": WAIT_MAX_S, "shutdown_timeout_s": 2.0}
    return DataPlaneConfig.model_validate(values | SMALL_BUFFERS | changes)

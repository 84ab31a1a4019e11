"""What the workers of an engine hold, all ranks together, and the data planes that serve them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.lookup import SAVED
from host_control.vllm.groups import Group
from host_control.vllm.metadata import WorkerHandshake
from host_control.vllm.parts import CUTS
from shadowserve.errors import ConfigurationError

__all__ = ["Workers", "agreed"]


@dataclass(frozen=True)
class Workers:
    """What all ranks have said.

    Attributes:
        model: what they call it.
        machine: what they compute on.
        layers: that may be loaded one by one; 0 where none may.
        layerwise_chunks: that a load may have which goes layer by layer.
        chunk_bytes: that a rank is delivered for a chunk, of all groups together.
        clients: of the data planes. One that serves several ranks is asked once for all of them.
        plain: whether records are pages as they are, which stay in their data planes' tiers.
        records: of each cut that all can read, 0 being their own, and of each group: who is asked for whose records.
        saved: of the records that preempted requests are saved in, likewise; none where they are those of cut 0.
    """

    model: bytes
    machine: str
    layers: int
    layerwise_chunks: int
    chunk_bytes: int
    clients: list[DataPlaneClient]
    plain: bool
    records: dict[int, list[list[tuple[DataPlaneClient, bytes]]]]
    saved: list[list[tuple[DataPlaneClient, bytes]]] | None


def agreed(handshakes: Mapping[int, WorkerHandshake], groups: Sequence[Group], config: HostConfig) -> Workers:
    """Return what the ranks hold together.

    Raises:
        ConfigurationError: one has a problem, they do not agree, or no client can be made of the configuration.
    """
    if problem := next((shake.problem for shake in handshakes.values() if shake.problem), ""):
        raise ConfigurationError(problem)
    shakes = [handshakes[rank] for rank in sorted(handshakes)]
    model = shakes[0].model
    if any(shake.model != model for shake in shakes):
        raise ConfigurationError("the ranks do not agree on what they compute: have they the same files and options?")
    every = {group.index for group in groups}
    held = [[index for cut, index, _ in shake.namespaces if cut == 0] for shake in shakes]
    if any(each != held[0] for each in held) or set(held[0]) != every:
        raise ConfigurationError("the ranks do not agree on what they keep: have they the same options?")
    addresses = [config.data_plane_address(rank) for rank in range(len(shakes))]
    first_rank = {address: rank for rank, address in reversed(list(enumerate(addresses)))}
    clients = {address: config.client(rank) for address, rank in first_rank.items()}
    named = [{(cut, index) for cut, index, _ in shake.namespaces} for shake in shakes]
    # Another cut's records are of use where each worker can read some of each group.
    cuts = [
        cut for cut in range(SAVED, len(CUTS) + 1) if all({(cut, index) for index in every} <= each for each in named)
    ]
    records = {
        cut: [
            [
                (clients[address], namespace)
                for address, shake in zip(addresses, shakes, strict=True)
                for number, index, namespace in shake.namespaces
                if (number, index) == (cut, group.index)
            ]
            for group in groups
        ]
        for cut in cuts
    }
    return Workers(
        model,
        f"{len(shakes)} x {shakes[0].machine}",
        max(shake.layers for shake in shakes),
        min(shake.layerwise_chunks for shake in shakes),
        max(shake.chunk_bytes for shake in shakes),
        list(clients.values()),
        any(shake.plain for shake in shakes),
        records,
        records.pop(SAVED, None),
    )

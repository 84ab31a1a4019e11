"""State of all workers of an engine, and the data planes that serve them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from host_control.client import DataPlaneClient
from host_control.config import HostConfig
from host_control.lookup import EXACT, SAVED
from host_control.vllm.groups import Group
from host_control.vllm.metadata import WorkerHandshake
from host_control.vllm.shards import SHARD_LAYOUTS
from shadowserve.errors import ConfigurationError

_Records = list[list[tuple[DataPlaneClient, bytes]]]


@dataclass(frozen=True)
class Workers:
    """The handshakes of all ranks, combined.

    Attributes:
        shake: Rank 0's handshake with the engine's values: the fewest chunks layer by layer, the most layers and bytes
            of any rank, the number of machines, and ``plain`` if any rank's records are. Its namespaces are rank 0's.
        clients: Clients of the data planes. One that serves several ranks is asked once for all of them.
        records: Records of each shard layout that all ranks can read (0: their own): of each group, clients and
            namespaces.
        saved: Likewise, the records of preempted requests; None where these are the engine's own.
        names: Different namespaces of the ranks' own records, by the group's index.
    """

    shake: WorkerHandshake
    clients: list[DataPlaneClient]
    records: dict[int, _Records]
    saved: _Records | None
    names: dict[int, list[bytes]]


def agreed(handshakes: Mapping[int, WorkerHandshake], groups: Sequence[Group], config: HostConfig) -> Workers:
    """Combine the handshakes of all ranks.

    Raises:
        ConfigurationError: A rank has a problem, the ranks disagree, or the configuration allows no client.
    """
    shakes = [handshakes[rank] for rank in sorted(handshakes)]
    _check(shakes, groups)
    addresses = [config.data_plane_address(rank) for rank in range(len(shakes))]
    first_rank = {address: rank for rank, address in reversed(list(enumerate(addresses)))}
    clients = {address: config.client(rank) for address, rank in first_rank.items()}
    served = [(clients[address], shake) for address, shake in zip(addresses, shakes, strict=True)]
    records = {layout: _records(served, groups, layout) for layout in _readable_layouts(shakes, groups)}
    shake = replace(
        shakes[0],
        machine=f"{len(shakes)} x {shakes[0].machine}",
        layers=max(shake.layers for shake in shakes),
        chunk_bytes=max(shake.chunk_bytes for shake in shakes),
        plain=any(shake.plain for shake in shakes),
    )
    names = {
        group.index: list(dict.fromkeys(namespace for _, namespace in each))
        for group, each in zip(groups, records[0], strict=True)
    }
    return Workers(shake, list(clients.values()), records, records.pop(SAVED, None), names)


def _check(shakes: Sequence[WorkerHandshake], groups: Sequence[Group]) -> None:
    if problem := next((shake.problem for shake in shakes if shake.problem), ""):
        raise ConfigurationError(problem)
    if len({shake.model for shake in shakes}) > 1:
        raise ConfigurationError("the ranks do not agree on what they compute: have they the same files and options?")
    held = [[index for layout, index, _ in shake.namespaces if layout == 0] for shake in shakes]
    if any(each != held[0] for each in held) or set(held[0]) != {group.index for group in groups}:
        raise ConfigurationError("the ranks do not agree on what they keep: have they the same options?")


def _readable_layouts(shakes: Sequence[WorkerHandshake], groups: Sequence[Group]) -> list[int]:
    """Return the shard layouts of which each rank can read some records of every group."""
    named = [{(layout, index) for layout, index, _ in shake.namespaces} for shake in shakes]
    return [
        layout
        for layout in range(EXACT, len(SHARD_LAYOUTS) + 1)
        if all({(layout, group.index) for group in groups} <= each for each in named)
    ]


def _records(
    served: Sequence[tuple[DataPlaneClient, WorkerHandshake]], groups: Sequence[Group], layout: int
) -> _Records:
    return [
        [
            (client, namespace)
            for client, shake in served
            for each, index, namespace in shake.namespaces
            if (each, index) == (layout, group.index)
        ]
        for group in groups
    ]

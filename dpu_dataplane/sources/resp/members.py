"""Several storage servers whose list changes while the data plane runs (:mod:`shadowserve.members`)."""

from dpu_dataplane.config import DataPlaneConfig
from dpu_dataplane.metrics import Metrics
from dpu_dataplane.sources.resp.several import SeveralServers
from shadowserve import members


class FollowedServers(SeveralServers):
    """The servers of ``storage_nodes``: a list, a file that is read again, or a name that is resolved again."""

    def __init__(self, config: DataPlaneConfig, metrics: Metrics) -> None:
        """ConfigurationError: the file cannot be used."""
        given = config.storage_nodes
        name = config.storage_server_name or members.service_of(given)  # in the certificates of all nodes of a service
        super().__init__(config.model_copy(update={"storage_server_name": name}), metrics, members.first(given))

        def refused() -> None:
            metrics.totals["storage_nodes_refused"] += 1

        self._follower = members.Follower(
            given, config.storage_nodes_ttl_s, self.set_members, refused, config.connect_timeout_s
        )

    async def start(self) -> None:
        await super().start()
        await self._follower.start()

    async def _disconnect(self) -> None:
        await self._follower.stop()
        await super()._disconnect()

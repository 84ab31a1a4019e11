"""Connection slots: authenticated connections by tenant, unauthenticated ones by network.

Unauthenticated clients may use only a share of the slots. When that share or all slots are full, the oldest
unauthenticated client is evicted, from the network that has most: an attacker who fills the share from one network
evicts only its own connections. Where there are several tenants, each has half of the slots unless configured
otherwise, and the last eighth is for tenants that use no more than their part of it.
"""

from collections.abc import Callable
from typing import Final

from storage_kv.access.authentication_throttle import network_of
from storage_kv.config import StorageConfig
from storage_kv.session import Session

_RESERVED_SHARE: Final = 8  # one in this many slots is for tenants that have no more than their part of these


class ConnectionSlots:
    """Counts sessions. Needs the node's lock. ``unauthenticated`` is without those that are being ended."""

    def __init__(self, config: Callable[[], StorageConfig], has_tenants: Callable[[], bool]) -> None:
        self._config = config
        self._has_tenants = has_tenants
        self.unauthenticated = 0
        self.by_tenant: dict[str, int] = {}
        self._by_network: dict[str, dict[int, Session]] = {}  # unauthenticated, the oldest first

    def has_free(self, tenant: str) -> bool:
        config, used = self._config(), self.by_tenant.get(tenant, 0)
        limits, slots = config.tenants.get(tenant), config.connections_max
        if limits is not None and limits.connections_max is not None:
            return used < limits.connections_max
        if not self._has_tenants():
            return used < slots
        reserved = slots // _RESERVED_SHARE
        is_modest = used * max(2, len(self.by_tenant) + 1) < reserved
        return 2 * used < slots and (is_modest or sum(self.by_tenant.values()) < slots - reserved)

    def enter(self, session: Session) -> None:
        """Count a session by its present state."""
        self.leave(session)
        if session.authenticated:
            session.slot_tenant = tenant = session.user.tenant
            self.by_tenant[tenant] = self.by_tenant.get(tenant, 0) + 1
        else:
            self._by_network.setdefault(network_of(session.address), {})[session.id] = session
            self.unauthenticated += 1

    def leave(self, session: Session) -> None:
        if session.slot_tenant is not None:
            tenant, session.slot_tenant = session.slot_tenant, None
            self.by_tenant[tenant] -= 1
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]
            return
        network = network_of(session.address)
        sessions = self._by_network.get(network)
        if sessions is not None and sessions.pop(session.id, None) is not None:
            self.unauthenticated -= 1
            if not sessions:
                del self._by_network[network]

    def evict_oldest(self) -> Session | None:
        """Stop counting the unauthenticated session to be ended for a newcomer, and return it; None for none."""
        if not self._by_network:
            return None
        sessions = max(self._by_network.values(), key=len)
        session = next(iter(sessions.values()))
        self.leave(session)
        return session

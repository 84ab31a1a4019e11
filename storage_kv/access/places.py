"""Who has a place: connections that have authenticated, by tenant, and strangers, by address.

Strangers hold only a share of the places. When it is full, or all places are taken, the oldest stranger goes, of the
address that has most: who means well authenticates within a round trip, and whoever fills the share from one address
pushes out only its own. A tenant has half of the places where there are several, unless it is configured to have more,
and the last eighth is for tenants that have no more than their part of it.
"""

from storage_kv.access.attempts import caller_of
from storage_kv.session import Session


class Places:
    """Counts sessions; used with the node's lock held.

    Attributes:
        strangers: sessions that have not authenticated, those that are being ended not included.
        authenticated: how many sessions have authenticated.
        by_tenant: how many these are, by their tenant's name.
    """

    def __init__(self) -> None:
        self.strangers = 0
        self.authenticated = 0
        self.by_tenant: dict[str, int] = {}
        self._by_caller: dict[str, dict[int, Session]] = {}  # strangers, the oldest first

    def enter(self, session: Session) -> None:
        """Count a session for what it is now."""
        self.leave(session)
        if session.authenticated:
            session.place = tenant = session.user.tenant
            self.by_tenant[tenant] = self.by_tenant.get(tenant, 0) + 1
            self.authenticated += 1
        else:
            self._by_caller.setdefault(caller_of(session.address), {})[session.id] = session
            self.strangers += 1

    def leave(self, session: Session) -> None:
        """Count a session no more; one that is not counted is let be."""
        if session.place is not None:
            tenant, session.place = session.place, None
            self.by_tenant[tenant] -= 1
            self.authenticated -= 1
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]
            return
        host = caller_of(session.address)
        there = self._by_caller.get(host)
        if there is not None and there.pop(session.id, None) is not None:
            self.strangers -= 1
            if not there:
                del self._by_caller[host]

    def give_way(self) -> Session | None:
        """Return the stranger who is to make way for a newcomer, counted no more; None without one."""
        if not self._by_caller:
            return None
        there = max(self._by_caller.values(), key=len)
        session = next(iter(there.values()))
        self.leave(session)
        return session

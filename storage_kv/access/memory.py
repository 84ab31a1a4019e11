"""Budgets of the memory that clients make a node hold: per client, per tenant, and in all.

There are two budgets. One is for memory beside the stored values: requests that arrive, and copied replies that wait.
The other is for stored values that cannot be evicted because they are being sent. The node's lock protects both.

A large amount is admitted before it is received; where there is no room, its client waits and is not read. A small
amount is counted as soon as it is there. If that exceeds the budget, the client that holds most is closed, of the
tenant that holds most, as Redis' ``maxmemory-clients`` does. While a client waits for room, the budget closes clients
that at their pace so far would not be done within ``stall_timeout_s``.

Where there are several tenants, each may hold half. All unauthenticated clients together may hold a sixteenth. The last
eighth is for tenants that hold no more than their part of it, so that two tenants with half each do not block a third.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

UNAUTHENTICATED: Final = -1
"""Stands for the tenant of clients that have not authenticated."""

_UNAUTHENTICATED_SHARE: Final = 16
_TENANT_SHARE: Final = 2
_RESERVED_SHARE: Final = 8
_PACE_SHARE: Final = 6  # a client's pace is known after this fraction of the timeout, at least a second


class Client(Protocol):
    """Owner of an account. Called with the node's lock held, in any thread."""

    @property
    def moved_bytes(self) -> int:
        """Bytes received and sent while it held memory."""

    def on_room(self) -> None:
        """Try again: there may be room."""

    def evict(self, held_bytes: int) -> None:
        """End soon: others need the memory that this one holds."""


@dataclass(slots=True, eq=False)
class Account:
    """The bytes that one client holds of one budget."""

    budget: "MemoryBudget"
    client: Client | None  # the owner; None once it is closed, so that the two form no reference cycle
    tenant: int
    held: int = 0  # number of bytes; several accounts may share stored values
    closed: bool = False  # nothing is counted any more
    is_next: bool = False  # it has waited, and it is its turn
    ticks: int = 0  # number of pace checks since a client waits
    start_moved_bytes: int = 0  # its client's moved bytes at the first pace check

    def set_held(self, held: int) -> None:
        if not self.closed and held != self.held:
            self.budget.change(self, held)

    def admit(self, more: int) -> bool:
        """Count more bytes if there is room; otherwise its client is notified when to try again."""
        return self.budget.admit(self, more)

    def move(self, tenant: int) -> None:
        held = self.held
        self.set_held(0)
        self.tenant = tenant
        self.set_held(held)

    def close(self) -> None:
        self.set_held(0)
        self.closed = True
        self.client = None


class MemoryBudget:
    """A number of bytes that all accounts together must not exceed.

    A budget of own memory counts what accounts hold. A budget of stored values counts pins: a value counts once,
    however many clients it is sent to. ``is_tight``: more than a sixteenth is used, so admission needs checks.
    """

    def __init__(self, bytes_max: Callable[[], int], tenants: Callable[[], int], *, is_own_memory: bool) -> None:
        """Create a budget of which nothing is used; the functions return its present size, and who shares it.

        ``is_own_memory``: excess is freed at once by closing clients; otherwise clients wait.
        """
        self._bytes_max = bytes_max
        self._tenants = tenants
        self._is_own_memory = is_own_memory
        self._by_tenant: dict[int, int] = {}
        self._holders: set[Account] = set()
        self._queues: dict[int, deque[tuple[Account, int]]] = {}
        self._pins: dict[int, list[int]] = {}  # count, size, tenant
        self.used = 0
        self.is_tight = False

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def share(self, tenant: int) -> int:
        bytes_max = self._bytes_max()
        if tenant == UNAUTHENTICATED:
            return bytes_max // _UNAUTHENTICATED_SHARE
        return bytes_max // _TENANT_SHARE if self._tenants() > 1 else bytes_max

    def used_by(self, tenant: int) -> int:
        return self._by_tenant.get(tenant, 0)

    def has_room(self, tenant: int, more: int) -> bool:
        """Return True if a tenant may hold more bytes. A tenant that holds nothing may exceed its share once."""
        bytes_max = self._bytes_max()
        if self.used + more <= bytes_max // _UNAUTHENTICATED_SHARE:  # most often
            return True
        held = self._by_tenant.get(tenant, 0)
        if held and held + more > self.share(tenant):
            return False
        tenants = self._tenants()
        if tenants > 1 and self.used and held + more > bytes_max // _RESERVED_SHARE // tenants:
            bytes_max -= bytes_max // _RESERVED_SHARE
        return self.used + more <= bytes_max

    def _admits(self, tenant: int, more: int, promised: int = 0) -> bool:
        """Return True if there is room beside bytes ``promised`` to others; a value above the budget is sent alone."""
        is_alone = not (self._is_own_memory or self.used or promised)
        return is_alone or self.has_room(tenant, promised + more)

    def is_open(self, tenant: int) -> bool:
        """Return True if a tenant may hold more and none of its clients waits."""
        return not self.is_tight or (tenant not in self._queues and self.has_room(tenant, 1))

    @property
    def mean_pin_bytes(self) -> int:
        return self.used // max(1, len(self._pins))

    # ---- Counting

    def change(self, account: Account, held: int) -> None:
        more = held - account.held
        account.held = held
        if held:
            self._holders.add(account)
        else:
            self._holders.discard(account)
            account.ticks = 0
        if self._is_own_memory:
            self._use(account.tenant, more)
            if more > 0 and not self.has_room(account.tenant, 0):
                self._close_largest_holders(account.tenant)

    def transfer(self, giver: Account, taker: Account, size: int) -> None:
        giver.held -= size
        taker.held += size
        self._holders.add(taker)
        if not giver.held:
            self._holders.discard(giver)
            giver.ticks = 0

    def _use(self, tenant: int, more: int) -> None:
        self.used += more
        self.is_tight = self.used > self._bytes_max() // _UNAUTHENTICATED_SHARE
        total = self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + more
        if not total:
            del self._by_tenant[tenant]
        if more < 0 and self._queues:
            self._notify()

    def pin(self, key: int, size: int, tenant: int) -> None:
        """Count a stored value that is kept in memory; once, however often it is pinned."""
        pinned = self._pins.get(key)
        if pinned is None:
            self._pins[key] = [1, size, tenant]
            self._use(tenant, size)
        else:
            pinned[0] += 1

    def unpin(self, key: int) -> None:
        pinned = self._pins[key]
        pinned[0] -= 1
        if not pinned[0]:
            del self._pins[key]
            self._use(pinned[2], -pinned[1])

    def _close_largest_holders(self, tenant: int) -> None:
        """Close the largest holders until the whole, and one tenant, are within their limits."""
        while self.used > self._bytes_max():
            self._evict(self._largest(max(self._by_tenant, key=self._by_tenant.__getitem__)))
        while self._by_tenant.get(tenant, 0) > self.share(tenant) and self._count_holders(tenant) > 1:
            self._evict(self._largest(tenant))

    def _count_holders(self, tenant: int) -> int:
        return sum(account.tenant == tenant for account in self._holders)

    def _largest(self, tenant: int) -> Account:
        return max((account for account in self._holders if account.tenant == tenant), key=lambda each: each.held)

    def _evict(self, account: Account) -> None:
        held, client = account.held, account.client
        account.close()
        if client is not None:
            client.evict(held)

    # ---- Waiting

    def admit(self, account: Account, more: int) -> bool:
        """See :meth:`Account.admit`; an account without room enters the queue of its tenant."""
        is_next, account.is_next = account.is_next, False
        queue = self._queues.get(account.tenant)
        if (is_next or not queue) and self._admits(account.tenant, more):
            if self._is_own_memory:
                account.set_held(account.held + more)
            return True
        if queue is None:
            queue = self._queues[account.tenant] = deque()
        if is_next:
            queue.appendleft((account, more))
        else:
            queue.append((account, more))
        return False

    def _notify(self) -> None:
        """Notify the accounts for which there is room: in order within a tenant, the tenant with least bytes first."""
        promised = 0
        for tenant in sorted(self._queues, key=lambda each: self._by_tenant.get(each, 0)):
            queue = self._queues[tenant]
            while queue:
                account, more = queue[0]
                if account.client is not None and account.tenant == tenant:
                    if not self._admits(tenant, more, promised):
                        break
                    promised += more
                    account.is_next = True
                    account.client.on_room()
                queue.popleft()
            if not queue:
                del self._queues[tenant]

    def close_slow_holder(self, timeout_s: float, tick_s: float) -> None:
        """While a client waits for room, close one that holds much and at its pace would not be done in ``timeout_s``.

        Call it every ``tick_s``.
        """
        if not self._queues:
            return
        self._notify()
        pace_ticks = max(1.0, timeout_s / _PACE_SHARE) / tick_s
        slow: list[Account] = []
        for account in self._holders:
            assert account.client is not None
            moved = account.client.moved_bytes
            if not account.ticks:
                account.start_moved_bytes = moved
            account.ticks += 1
            pace = (moved - account.start_moved_bytes) / (account.ticks * tick_s)
            if account.ticks > pace_ticks and account.held > pace * timeout_s:
                slow.append(account)
        if slow and self._queues:
            self._evict(max(slow, key=lambda each: (self._by_tenant.get(each.tenant, 0), each.held)))

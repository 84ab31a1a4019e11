"""How much the clients of a node may make it hold: one, those of one tenant, and all of them together.

There are two bounds. One is of memory that clients cost beside the values that are stored: requests on their way in,
and replies that are copied out and not taken yet. The other is of stored values that cannot go because they are being
sent. Both are kept with the node's lock held, where commands are executed.

What is large is admitted before it is received; where there is no room, its client waits and is not read. What is
small is counted as soon as it is there; where that is too much, the client that holds most is closed, of the tenant
that holds most, as Redis' ``maxmemory-clients`` does. Where somebody waits, those are closed who would not be done
within ``stall_timeout_s`` at the pace that they have kept: who dribbles keeps nobody waiting.

A tenant has no more than half where there are several, and strangers, who have yet to authenticate, a sixteenth. The
last eighth is for tenants that hold no more than their part of it, so that two with half each keep no third waiting.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

STRANGERS: Final = -1
"""The tenant of those who have yet to authenticate."""

_STRANGERS_SHARE: Final = 16
_TENANT_SHARE: Final = 2
_RESERVED_SHARE: Final = 8
_PACED_SHARE: Final = 6
"""Of the patience, for which a client is looked at until its pace is known; and a second at least."""


class Client(Protocol):
    """What is told to the owner of an account; called with the node's lock held, in any thread."""

    @property
    def moved_bytes(self) -> int:
        """Received and sent while it held anything."""

    def on_memory(self) -> None:
        """Try again: there may be room."""

    def end_for_memory(self, held_bytes: int) -> None:
        """End, soon: others need what this one holds."""


class Account:
    """What one client holds of one bound.

    Attributes:
        held: bytes, which may be others', too.
        tenant: whose share they count against.
        client: whose account it is; None of a closed one, or neither would be freed without a full collection.
        closed: nothing is counted any more.
        woken: it has waited, and it is its turn.
        ticks: how often it was looked at since somebody waits.
        began: what its client had moved when it was first looked at.
    """

    __slots__ = ("began", "bound", "client", "closed", "held", "tenant", "ticks", "woken")

    def __init__(self, bound: "Bound", client: Client, tenant: int) -> None:
        self.bound = bound
        self.client: Client | None = client
        self.tenant = tenant
        self.held = 0
        self.closed = self.woken = False
        self.ticks = 0
        self.began = 0

    def settle(self, held: int) -> None:
        """Say how much it holds now."""
        if not self.closed and held != self.held:
            self.bound.change(self, held)

    def admit(self, more: int) -> bool:
        """Count so much more, if there is room; else its client is told when to try again."""
        return self.bound.admit(self, more)

    def pass_on(self, other: "Account", size: int) -> None:
        """Have another account of the same bound and tenant hold some of what this one does."""
        self.bound.pass_on(self, other, size)

    def move(self, tenant: int) -> None:
        """Make what it holds, and will hold, another tenant's."""
        held = self.held
        self.settle(0)
        self.tenant = tenant
        self.settle(held)

    def close(self) -> None:
        self.settle(0)
        self.closed = True
        self.client = None


class Bound:
    """A number of bytes that all accounts together stay within.

    What is ours is what the accounts hold. What is not, stored values, is pinned beside that, and counts once however
    many hold it.

    Attributes:
        used: bytes.
        is_tight: so much is used that it has to be looked at who uses it.
        waiting: accounts that wait for room.
    """

    def __init__(self, bytes_max: Callable[[], int], tenants: Callable[[], int], *, is_ours: bool) -> None:
        """Nothing is held of it yet.

        Args:
            bytes_max: the bound, which may change.
            tenants: how many tenants share it; 1 where there is only one.
            is_ours: what is beyond the bound must go at once; else it is waited until it does.
        """
        self._bytes_max = bytes_max
        self._tenants = tenants
        self._is_ours = is_ours
        self._by_tenant: dict[int, int] = {}
        self._holders: set[Account] = set()
        self._queues: dict[int, deque[tuple[Account, int]]] = {}
        self._pins: dict[int, list[int]] = {}  # how often, how many bytes, whose
        self.used = 0
        self.is_tight = False

    @property
    def waiting(self) -> int:
        """How many accounts wait for room."""
        return sum(map(len, self._queues.values()))

    def share(self, tenant: int) -> int:
        """Return how much one tenant may hold."""
        bytes_max = self._bytes_max()
        if tenant == STRANGERS:
            return bytes_max // _STRANGERS_SHARE
        return bytes_max // _TENANT_SHARE if self._tenants() > 1 else bytes_max

    def used_by(self, tenant: int) -> int:
        """Return how much one tenant holds."""
        return self._by_tenant.get(tenant, 0)

    def has_room(self, tenant: int, more: int) -> bool:
        """Return whether a tenant may hold so much more. Alone, anything may be held that fits the whole."""
        bytes_max = self._bytes_max()
        if self.used + more <= bytes_max // _STRANGERS_SHARE:  # most often
            return True
        held = self._by_tenant.get(tenant, 0)
        if held and held + more > self.share(tenant):
            return False
        tenants = self._tenants()
        if tenants > 1 and self.used and held + more > bytes_max // _RESERVED_SHARE // tenants:
            bytes_max -= bytes_max // _RESERVED_SHARE
        return self.used + more <= bytes_max

    def _admits(self, tenant: int, more: int, promised: int = 0) -> bool:
        """Return whether somebody may hold so much more beside what others have been promised.

        What is stored may be larger than this bound, and can be sent all the same, alone.
        """
        is_alone = not (self._is_ours or self.used or promised)
        return is_alone or self.has_room(tenant, promised + more)

    def is_open(self, tenant: int) -> bool:
        """Return whether a tenant may hold more, and nobody of it waits to."""
        return not self.is_tight or (tenant not in self._queues and self.has_room(tenant, 1))

    @property
    def typical(self) -> int:
        """How large what is pinned is, on average."""
        return self.used // max(1, len(self._pins))

    # ---- Holding

    def change(self, account: Account, held: int) -> None:
        """Take note of what an account holds; see :meth:`Account.settle`."""
        more = held - account.held
        account.held = held
        if held:
            self._holders.add(account)
        else:
            self._holders.discard(account)
            account.ticks = 0
        if self._is_ours:
            self._use(account.tenant, more)
            if more > 0 and not self.has_room(account.tenant, 0):
                self._relieve(account.tenant)

    def pass_on(self, giver: Account, taker: Account, size: int) -> None:
        """Have one account hold some of what another one does; see :meth:`Account.pass_on`."""
        giver.held -= size
        taker.held += size
        self._holders.add(taker)
        if not giver.held:
            self._holders.discard(giver)
            giver.ticks = 0

    def _use(self, tenant: int, more: int) -> None:
        self.used += more
        self.is_tight = self.used > self._bytes_max() // _STRANGERS_SHARE
        total = self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + more
        if not total:
            del self._by_tenant[tenant]
        if more < 0 and self._queues:
            self._wake()

    def pin(self, key: int, size: int, tenant: int) -> None:
        """Count something of somebody else's that is kept; once, however often it is pinned."""
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

    def _relieve(self, tenant: int) -> None:
        """Close those who hold most until what all, and one tenant, hold is within the bounds."""
        while self.used > self._bytes_max():
            self._end(self._largest(max(self._by_tenant, key=self._by_tenant.__getitem__)))
        while self._by_tenant.get(tenant, 0) > self.share(tenant) and self._count(tenant) > 1:
            self._end(self._largest(tenant))

    def _count(self, tenant: int) -> int:
        return sum(account.tenant == tenant for account in self._holders)

    def _largest(self, tenant: int) -> Account:
        return max((account for account in self._holders if account.tenant == tenant), key=lambda each: each.held)

    def _end(self, account: Account) -> None:
        held, client = account.held, account.client
        account.close()
        if client is not None:
            client.end_for_memory(held)

    # ---- Waiting

    def admit(self, account: Account, more: int) -> bool:
        """Count more for an account if there is room, else put it into the queue; see :meth:`Account.admit`."""
        woken, account.woken = account.woken, False
        queue = self._queues.get(account.tenant)
        if (woken or not queue) and self._admits(account.tenant, more):
            if self._is_ours:
                account.settle(account.held + more)
            return True
        if queue is None:
            queue = self._queues[account.tenant] = deque()
        if woken:
            queue.appendleft((account, more))
        else:
            queue.append((account, more))
        return False

    def _wake(self) -> None:
        """Tell those for whom there is room, first come first served in each tenant, the one with least first."""
        promised = 0
        for tenant in sorted(self._queues, key=lambda each: self._by_tenant.get(each, 0)):
            queue = self._queues[tenant]
            while queue:
                account, more = queue[0]
                if account.client is not None and account.tenant == tenant:
                    if not self._admits(tenant, more, promised):
                        break
                    promised += more
                    account.woken = True
                    account.client.on_memory()
                queue.popleft()
            if not queue:
                del self._queues[tenant]

    def press(self, patience_s: float, tick_s: float) -> None:
        """Where somebody waits, close one who holds much and gets on too slowly; to be called every ``tick_s``.

        Args:
            patience_s: within which whoever holds something must be done with it, at the pace so far.
            tick_s: time between two calls.
        """
        if not self._queues:
            return
        self._wake()
        paced_ticks = max(1.0, patience_s / _PACED_SHARE) / tick_s
        slow: list[Account] = []
        for account in self._holders:
            assert account.client is not None
            moved = account.client.moved_bytes
            if not account.ticks:
                account.began = moved
            account.ticks += 1
            pace = (moved - account.began) / (account.ticks * tick_s)
            if account.ticks > paced_ticks and account.held > pace * patience_s:
                slow.append(account)
        if slow and self._queues:
            self._end(max(slow, key=lambda each: (self._by_tenant.get(each.tenant, 0), each.held)))

"""Fair shares among tenants of what all have in the bucket.

Every node computes the same shares from its configuration and a list of the bucket.
"""

from collections.abc import Collection, Mapping


class Shares:
    """Shares of a total, by tenants' quotas. For one thread at a time."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._quotas: dict[str, int] = {}
        self._known: frozenset[str] = frozenset()
        self._shares: dict[str, float] = {}

    def set_quota(self, tenant: str, quota: int | None) -> None:
        if quota is None:
            self._quotas.pop(tenant, None)
        else:
            self._quotas[tenant] = quota
        self._known = frozenset()

    def among(self, tenants: Collection[str]) -> Mapping[str, float]:
        """Return the share of each of ``tenants``, which use something now; the sum is at most the total.

        A tenant with a quota has its quota. The others share the rest equally, and have at least an equal part of the
        whole; quotas shrink in proportion for that.
        """
        present = frozenset(tenants)
        if present != self._known or not self._shares:
            self._known, self._shares = present, self._divide(present)
        return self._shares

    def _divide(self, tenants: frozenset[str]) -> dict[str, float]:
        if not tenants:
            return {}
        bounded = {tenant: self._quotas[tenant] for tenant in tenants if tenant in self._quotas}
        claimed, free = sum(bounded.values()), len(tenants) - len(bounded)
        equal = max((self.total - claimed) / free, self.total / len(tenants)) if free else 0.0
        left = self.total - free * equal
        shrunk = min(1.0, left / claimed) if claimed else 1.0
        return {tenant: bounded[tenant] * shrunk if tenant in bounded else equal for tenant in tenants}


def most_beyond(used: Mapping[str, float], shares: Mapping[str, float]) -> str:
    """Return the tenant that uses most of its share, or exceeds it most; by name among equals."""

    def beyond(tenant: str) -> tuple[float, str]:
        share = shares[tenant]
        return used[tenant] / share if share > 0 else float("inf"), tenant

    return max(used, key=beyond)

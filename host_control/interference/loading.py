"""Predicts the duration of loads: a linear model per tier, learnt from loads that have ended.

The duration of a load from several tiers is divided among them as predicted; an unknown tier gets the rest. The
prediction is the sum over the tiers: an upper bound, because local bytes are decoded while remote ones arrive.
"""

from collections.abc import Mapping
from typing import Any, Final

from host_control.interference.estimate import Estimate
from shadowserve.tier import Tier

_OVER_LINK: Final = (Tier.STORAGE, Tier.COLD)
"""Tiers behind the link to storage nodes: cold chunks come over the same link, after the node has read them."""


class LoadTable:
    """The loading times of one engine."""

    def __init__(self) -> None:
        self._lines = {tier: Estimate(2) for tier in (Tier.MEMORY, Tier.DEVICE, Tier.STORAGE)}
        self._lines[Tier.COLD] = Estimate(1)

    def predict(self, tier_bytes: Mapping[Tier, float], cold_seconds: float = 0.0) -> dict[Tier, float] | None:
        """Return the seconds that each tier adds to a load; ``None`` if a tier is not known.

        ``cold_seconds``: the storage node's estimate for the cold bytes. It is used unchanged until three loads with
        cold bytes were observed, and alone if nothing else is known.
        """
        known = self._known(_sizes(tier_bytes, cold_seconds))
        if any(each is None and (tier is not Tier.STORAGE or Tier.COLD not in known) for tier, each in known.items()):
            return None
        return {tier: each or 0.0 for tier, each in known.items()}

    def observe(self, tier_bytes: Mapping[Tier, float], cold_seconds: float, seconds: float) -> None:
        """Learn the duration of a load with the given bytes per tier."""
        sizes = _sizes(tier_bytes, cold_seconds)
        known = self._known(sizes)
        unknown_bytes = sum(sizes[tier][0] for tier, each in known.items() if each is None)
        known_seconds = sum(filter(None, known.values()))
        for tier, each in known.items():
            if each is None:
                share = max(seconds - known_seconds, 0.0) * sizes[tier][0] / unknown_bytes
            elif unknown_bytes:
                continue  # with an unknown tier, the load shows nothing about known tiers
            else:
                share = seconds * each / known_seconds if known_seconds else 0.0
            self._lines[tier].observe(sizes[tier], share)

    def _known(self, sizes: Mapping[Tier, tuple[float, ...]]) -> dict[Tier, float | None]:
        known = {tier: self._lines[tier].predict(each) for tier, each in sizes.items()}
        if Tier.COLD in known and known[Tier.COLD] is None:
            (known[Tier.COLD],) = sizes[Tier.COLD]
        return known

    def pack(self) -> dict[str, Any]:
        return {tier.label: line.pack() for tier, line in self._lines.items()}

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Replace the state by one from :meth:`pack`; invalid data raises ValueError, TypeError or KeyError."""
        for tier, line in self._lines.items():
            line.restore(packed[tier.label])


def _sizes(tier_bytes: Mapping[Tier, float], cold_seconds: float) -> dict[Tier, tuple[float, ...]]:
    """Return the terms of each tier's line."""
    sizes: dict[Tier, tuple[float, ...]] = {}
    for tier, size in tier_bytes.items():
        if size > 0:
            line = Tier.STORAGE if tier in _OVER_LINK else tier
            sizes[line] = (sizes.get(line, (0.0,))[0] + size, 1)
    if tier_bytes.get(Tier.COLD):
        sizes[Tier.COLD] = (cold_seconds,)
    return sizes

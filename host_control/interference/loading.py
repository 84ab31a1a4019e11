"""Predicts the duration of loads: a linear model per tier, learnt from loads that have ended.

The duration of a load from several tiers is divided among them as predicted; an unknown tier gets the rest. The
prediction is the sum over the tiers. This is an upper bound, because local bytes are decoded while remote ones arrive.
The longest part alone would be too short if all tiers wait for the same decoder.

No clock and no I/O.
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
        self._cold = Estimate(1)

    def predict(self, tier_bytes: Mapping[Tier, float], cold_seconds: float = 0.0) -> dict[Tier, float] | None:
        """Return the seconds that each tier adds to a load; ``None`` if a tier is not known.

        Args:
            tier_bytes: Stored bytes of the load by tier.
            cold_seconds: The storage node's estimate for the cold bytes. It is used unchanged until three loads with
                cold bytes were observed, and alone if nothing else is known.
        """
        predicted: dict[Tier, float] = {}
        for tier, size in self._by_line(tier_bytes).items():
            seconds = self._lines[tier].predict((size, 1))
            if seconds is None and (tier is not Tier.STORAGE or not tier_bytes.get(Tier.COLD)):
                return None
            predicted[tier] = seconds or 0.0
        if tier_bytes.get(Tier.COLD):
            learnt = self._cold.predict((cold_seconds,))
            predicted[Tier.COLD] = cold_seconds if learnt is None else learnt
        return predicted

    def observe(self, tier_bytes: Mapping[Tier, float], cold_seconds: float, seconds: float) -> None:
        """Learn the duration of a load with the given bytes per tier."""
        sizes = self._by_line(tier_bytes)
        known = {tier: self._lines[tier].predict((size, 1)) for tier, size in sizes.items()}
        if tier_bytes.get(Tier.COLD):
            learnt = self._cold.predict((cold_seconds,))
            known[Tier.COLD] = cold_seconds if learnt is None else learnt
        unknown_bytes = sum(sizes[tier] for tier, each in known.items() if each is None)
        known_seconds = sum(filter(None, known.values()))
        for tier, each in known.items():
            if each is None:
                share = max(seconds - known_seconds, 0.0) * sizes[tier] / unknown_bytes
            elif unknown_bytes:
                continue  # with an unknown tier, the load shows nothing about known tiers
            else:
                share = seconds * each / known_seconds if known_seconds else 0.0
            if tier is Tier.COLD:
                self._cold.observe((cold_seconds,), share)
            else:
                self._lines[tier].observe((sizes[tier], 1), share)

    @staticmethod
    def _by_line(tier_bytes: Mapping[Tier, float]) -> dict[Tier, float]:
        sizes: dict[Tier, float] = {}
        for tier, size in tier_bytes.items():
            if size > 0:
                line = Tier.STORAGE if tier in _OVER_LINK else tier
                sizes[line] = sizes.get(line, 0.0) + size
        return sizes

    def pack(self) -> dict[str, Any]:
        """Return the state as JSON-compatible data for :meth:`restore`."""
        return {tier.label: line.pack() for tier, line in self._all()}

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Replace the state by one from :meth:`pack`.

        Raises:
            ValueError, TypeError, KeyError: The data is invalid.
        """
        for tier, line in self._all():
            line.restore(packed[tier.label])

    def _all(self) -> list[tuple[Tier, Estimate]]:
        return [*self._lines.items(), (Tier.COLD, self._cold)]

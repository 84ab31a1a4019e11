"""How long loads take, by the tiers that they load from: a line for each, learnt from loads that have ended.

A load from one tier shows that tier's line. Of a load from several each tier has its share, as predicted; a tier that
nothing is known of yet has what the others leave. The prediction is the sum of all. Near bytes are decoded while far
ones arrive, so it is too long by the near part at most; the longest part alone would be too short where all tiers wait
for the same decoder.

No clock and no I/O: times are handed over.
"""

from collections.abc import Mapping
from typing import Any, Final

from host_control.interference.estimate import Estimate
from shadowserve.tier import Tier

_OVER_LINK: Final = (Tier.STORAGE, Tier.COLD)
"""Once it is near enough, what was cold comes as what storage has had all the time."""


class LoadTable:
    """Of one engine."""

    def __init__(self) -> None:
        self._lines = {tier: Estimate(2) for tier in (Tier.MEMORY, Tier.DEVICE, Tier.STORAGE)}
        self._cold = Estimate(1)

    def predict(self, tier_bytes: Mapping[Tier, float], cold_seconds: float = 0.0) -> dict[Tier, float] | None:
        """Return the seconds that each tier adds to a load; ``None`` where a tier of it is not known.

        Args:
            tier_bytes: of the load, as they are stored.
            cold_seconds: in which storage expects to have what is cold of it. That is believed as it is, until three
                loads have shown what to make of it; and where nothing else is known, it is all there is.
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
        """Learn that a load took so long, of so many bytes from each tier."""
        sizes = self._by_line(tier_bytes)
        known = {tier: self._lines[tier].predict((size, 1)) for tier, size in sizes.items()}
        if tier_bytes.get(Tier.COLD):
            learnt = self._cold.predict((cold_seconds,))
            known[Tier.COLD] = cold_seconds if learnt is None else learnt
        unknown_bytes = sum(sizes[tier] for tier, each in known.items() if each is None)
        together = sum(filter(None, known.values()))
        for tier, each in known.items():
            if each is None:
                share = max(seconds - together, 0.0) * sizes[tier] / unknown_bytes
            elif unknown_bytes:
                continue  # the rest says nothing of those that are known
            else:
                share = seconds * each / together if together else 0.0
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
        """Return what was learnt, as numbers for :meth:`restore`."""
        return {tier.label: line.pack() for tier, line in self._all()}

    def restore(self, packed: Mapping[str, Any]) -> None:
        """Begin with what another one has learnt.

        Raises:
            ValueError, TypeError, KeyError: it is nothing that :meth:`pack` gives.
        """
        for tier, line in self._all():
            line.restore(packed[tier.label])

    def _all(self) -> list[tuple[Tier, Estimate]]:
        return [*self._lines.items(), (Tier.COLD, self._cold)]

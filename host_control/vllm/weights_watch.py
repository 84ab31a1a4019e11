"""Checks whether a worker still computes with the weights of the current epoch.

The weights are *in doubt* after the scheduler reports a possible change, and after marks have changed, until a digest
that was started later equals the epoch's. Until then, loads are not confirmed and stores wait. Without a doubt, samples
are compared. An *audit* computes a digest from time to time; no load or store waits for it.
"""

import threading
import time
from typing import Final

from host_control.vllm.loaded_weights import Digest, LoadedWeights, Sample

_AUDIT_S: Final = 60.0
_AUDIT_SHARE: Final = 0.002
"""Largest share of the engine's time that audits run."""


class WeightsWatch:
    """Knows whether a worker's weights are those of the current epoch. The scheduler decides when a new epoch begins.

    :meth:`follow` and :meth:`look` run on the thread that computes, the other methods on any thread.

    Args:
        weights: Weights of the engine. ``None``: only the scheduler's reports count.
        ranks: Number of workers. A worker's KV depends on the weights of all of them.
    """

    def __init__(self, weights: LoadedWeights | None, *, ranks: int = 1, audit_s: float = _AUDIT_S) -> None:
        self.epoch = ""
        self._weights = weights
        self._ranks = ranks
        self._audit_s = audit_s
        self._condition = threading.Condition()
        self._outlived = False  # the weights have changed since the epoch began
        self._doubts = self._agreed = self._reported = 0  # numbers of doubts, counted by the scheduler
        self._requested = self._verified = 0  # numbers of digests that loads and stores wait for
        self._running: list[tuple[Digest, int, int]] = []  # each with the number of doubts and of requested digests
        self._verified_doubts = 0
        self._reference: Digest | None = None  # of the epoch
        self._audit_at_s = float("inf")
        self._started_s = 0.0
        self._closed = False
        self._first = self.sample()
        self._request_digest()

    # ---- On the thread that computes ---------------------------------------------------------------------------------

    def follow(self, epoch: str, doubts: int = 0, agreed: int = 0) -> None:
        """Apply the scheduler's view. A new epoch begins with the current weights.

        Args:
            agreed: Number of the last doubt after which all ranks still had the epoch's weights.
        """
        if epoch == self.epoch and doubts == self._doubts and agreed == self._agreed:
            if time.monotonic() >= self._audit_at_s:
                self._audit()
            return
        renewed = epoch != self.epoch
        doubted = renewed or doubts != self._doubts
        if self._weights is not None and doubted:
            self._weights.refresh()
        first = self.sample() if renewed else None
        with self._condition:
            self._doubts, self._agreed = doubts, agreed
            if renewed:
                self._cancel(0)
                self.epoch, self._first, self._outlived, self._reference = epoch, first, False, None
            self._condition.notify_all()
        if doubted:
            self._request_digest()

    def look(self) -> None:
        """Compare marks. Called in each step that stores or has loaded KV."""
        if self._weights is not None and not self._weights.unchanged():
            self._weights.refresh()
            self._request_digest()

    def _request_digest(self) -> None:
        """Start a digest that loads and stores wait for."""
        if self._weights is None:
            return
        digest = self._weights.digest()
        with self._condition:
            self._requested += 1
            self._add_running(digest)

    def _audit(self) -> None:
        if self._weights is None or self._running:
            return
        digest = self._weights.digest(hurried=False)
        with self._condition:
            self._add_running(digest)

    def _add_running(self, digest: Digest) -> None:
        # Keep the first digest of an epoch, the reference for all others. Of the others only the newest is needed.
        self._cancel(1 if self._reference is None else 0)
        self._running.append((digest, self._doubts, self._requested))
        self._started_s, self._audit_at_s = time.monotonic(), float("inf")
        self._condition.notify_all()

    def _cancel(self, kept: int) -> None:
        for digest, _, _ in self._running[kept:]:
            digest.cancel()
        del self._running[kept:]

    def take_verified(self) -> int:
        """Return the number of the last doubt that ended here, to be reported to the scheduler; 0 for no news."""
        if self._ranks == 1 or self._reported == self._doubts:
            return 0
        self._compare_done()
        if self._outlived or self._verified < self._requested or self._verified_doubts == self._reported:
            return 0
        self._reported = self._verified_doubts
        return self._reported

    def resume(self) -> None:
        if self._closed:
            self._closed = False
            if self._weights is not None:
                self._weights.refresh()
            self._request_digest()

    def close(self) -> None:
        """Cancel running digests. The weights are in doubt until :meth:`resume`."""
        with self._condition:
            self._closed = True
            self._cancel(1 if self._reference is None else 0)
            self._condition.notify_all()

    # ---- On any thread -----------------------------------------------------------------------------------------------

    def sample(self) -> Sample | None:
        """Take a sample after all work in the current stream."""
        return self._weights.sample() if self._weights is not None else None

    def known(self, timeout: float = 0.0, *, everywhere: bool = False) -> bool:
        """Wait until the weights are not in doubt; return True if they are not.

        Args:
            everywhere: Also wait for the other ranks. This needs further steps of the engine.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._compare_done()
            with self._condition:
                if self._outlived or self._weights is None:
                    return True
                if self._closed:
                    return False
                pending = self._running[0][0] if self._verified < self._requested and self._running else None
                if pending is None:
                    if not everywhere or self._ranks == 1 or self._agreed >= self._doubts:
                        return True
                    if not self._condition.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                        return False
                    continue
            if not pending.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                return False

    def check(self, epoch: str, sample: Sample | None) -> bool:
        """Return True if ``epoch`` is still the current one and ``sample`` has its weights."""
        self._compare_done()
        with self._condition:
            first = self._first
            lasts = epoch == self.epoch and not self._outlived
        if lasts and sample is not None and first is not None and not sample.same(first):
            with self._condition:
                self._outlived = self._outlived or epoch == self.epoch
            lasts = False
        return lasts

    def lasts(self, epoch: str) -> bool:
        """Return True if ``epoch`` is still the current one, by the digests that are complete."""
        return self.check(epoch, None)

    @property
    def outlived(self) -> set[str]:
        """The current epoch if the weights have changed since it began, else empty."""
        if self._running:
            self._compare_done()
        if not self._outlived:
            return set()
        with self._condition:
            return {self.epoch} if self._outlived else set()

    def _compare_done(self) -> None:
        """Compare complete digests with the epoch's first one."""
        with self._condition:
            while self._running and self._running[0][0].done:
                digest, doubts, requested = self._running.pop(0)
                if self._reference is None:
                    self._reference = digest
                elif not digest.same(self._reference):
                    self._outlived = True
                self._verified, self._verified_doubts = requested, doubts
                took_s = time.monotonic() - self._started_s
                self._audit_at_s = time.monotonic() + max(self._audit_s, took_s / _AUDIT_SHARE)
                self._condition.notify_all()

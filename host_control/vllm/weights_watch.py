"""Whether a worker computes with the weights of its epoch.

They may have been changed when the scheduler says so (it has seen a call to the workers, a reset of the prefix
cache, or a pause of the engine), and when marks differ. The weights are *in doubt* then, until a digest that has begun
afterwards is the epoch's: what is loaded meanwhile does not count yet, and what is to be stored waits. Where there is
no doubt, samples are compared, and once in a while there is an *audit*: a digest for which no load or store waits.
"""

import threading
import time
from typing import Final

from host_control.vllm.loaded_weights import Digest, LoadedWeights, Sample

_AUDIT_S: Final = 60.0
_AUDIT_SHARE: Final = 0.002
"""Of an engine's time that audits take, at most."""


class WeightsWatch:
    """Which epoch the weights belong to that a worker computes with. The scheduler names epochs.

    :meth:`follow` and :meth:`look` are for the thread that computes, the others for any.

    Args:
        weights: of the engine; without them only what the scheduler says counts.
        ranks: workers of the engine: each one's KV depends on the weights of all.
        audit_s: seconds between audits.

    Attributes:
        epoch: that the scheduler has named last.
    """

    def __init__(self, weights: LoadedWeights | None, *, ranks: int = 1, audit_s: float = _AUDIT_S) -> None:
        self.epoch = ""
        self._weights = weights
        self._ranks = ranks
        self._audit_s = audit_s
        self._condition = threading.Condition()
        self._outlived = False
        self._doubts = self._agreed = self._reported = 0  # by the scheduler's count
        self._asked = self._verified = 0  # digests that are waited for, by our own
        self._running: list[tuple[Digest, int, int]] = []  # of so many doubts and digests asked for
        self._verified_doubts = 0
        self._reference: Digest | None = None  # of the epoch
        self._audit_at = float("inf")
        self._began = 0.0
        self._closed = False
        self._first = self.sample()
        self._ask()

    # ------------------------------------------------------------------ the thread that computes

    def follow(self, epoch: str, doubts: int = 0, agreed: int = 0) -> None:
        """Take note of what the scheduler knows; an epoch that is new begins with the weights as they are.

        Args:
            epoch: of the weights.
            doubts: how often they may have been changed so far.
            agreed: of these, at the last that has been settled all ranks had the epoch's weights.
        """
        if epoch == self.epoch and doubts == self._doubts and agreed == self._agreed:
            if time.monotonic() >= self._audit_at:
                self._audit()
            return
        renewed = epoch != self.epoch
        if self._weights is not None and (renewed or doubts != self._doubts):
            self._weights.refresh()
        first = self.sample() if renewed else None
        with self._condition:
            asked = renewed or doubts != self._doubts
            self._doubts, self._agreed = doubts, agreed
            if renewed:
                self._cancel(0)
                self.epoch, self._first, self._outlived, self._reference = epoch, first, False, None
            self._condition.notify_all()
        if asked:
            self._ask()

    def look(self) -> None:
        """Compare marks. For each step that stores something or has loaded something."""
        if self._weights is not None and not self._weights.unchanged():
            self._weights.refresh()
            self._ask()

    def _ask(self) -> None:
        """Begin a digest that is waited for."""
        if self._weights is None:
            return
        digest = self._weights.digest()
        with self._condition:
            self._asked += 1
            self._begin(digest)

    def _audit(self) -> None:
        if self._weights is None or self._running:
            return
        digest = self._weights.digest(hurried=False)
        with self._condition:
            self._begin(digest)

    def _begin(self, digest: Digest) -> None:
        # That with which an epoch begins is compared with all that follow it; of the others the last is enough.
        self._cancel(1 if self._reference is None else 0)
        self._running.append((digest, self._doubts, self._asked))
        self._began, self._audit_at = time.monotonic(), float("inf")
        self._condition.notify_all()

    def _cancel(self, kept: int) -> None:
        for digest, _, _ in self._running[kept:]:
            digest.cancel()
        del self._running[kept:]

    def take_settled(self) -> int:
        """Return the last doubt that is settled here, where that is to be reported to the scheduler; else 0."""
        if self._ranks == 1 or self._reported == self._doubts:
            return 0
        self._settle()
        if self._outlived or self._verified < self._asked or self._verified_doubts == self._reported:
            return 0
        self._reported = self._verified_doubts
        return self._reported

    def resume(self) -> None:
        """Go on after :meth:`close`."""
        if self._closed:
            self._closed = False
            if self._weights is not None:
                self._weights.refresh()
            self._ask()

    def close(self) -> None:
        """End what runs: nothing is known until :meth:`resume`."""
        with self._condition:
            self._closed = True
            self._cancel(1 if self._reference is None else 0)
            self._condition.notify_all()

    # ------------------------------------------------------------------ any thread

    def sample(self) -> Sample | None:
        """Take a sample, behind what the current stream has been given to do."""
        return self._weights.sample() if self._weights is not None else None

    def known(self, timeout: float = 0.0, *, everywhere: bool = False) -> bool:
        """Return whether the weights are not in doubt, once they are not, after ``timeout`` seconds at most.

        Args:
            timeout: to wait.
            everywhere: nor those of other ranks. Needs steps of the engine to go on meanwhile.
        """
        ends = time.monotonic() + timeout
        while True:
            self._settle()
            with self._condition:
                if self._outlived or self._weights is None:
                    return True
                if self._closed:
                    return False
                waited = self._running[0][0] if self._verified < self._asked and self._running else None
                if waited is None:
                    if not everywhere or self._ranks == 1 or self._agreed >= self._doubts:
                        return True
                    if not self._condition.wait(max(0.0, ends - time.monotonic())) and time.monotonic() >= ends:
                        return False
                    continue
            if not waited.wait(max(0.0, ends - time.monotonic())) and time.monotonic() >= ends:
                return False

    def check(self, epoch: str, sample: Sample | None) -> bool:
        """Return whether an epoch lasts: no other was named, and the weights were its own in ``sample``."""
        self._settle()
        with self._condition:
            first = self._first
            lasts = epoch == self.epoch and not self._outlived
        if lasts and sample is not None and first is not None and not sample.same(first):
            with self._condition:
                self._outlived = self._outlived or epoch == self.epoch
            lasts = False
        return lasts

    def lasts(self, epoch: str) -> bool:
        """Return whether an epoch lasts, as far as is known without another look."""
        return self.check(epoch, None)

    @property
    def outlived(self) -> set[str]:
        """The scheduler's epoch, if the weights have changed since it began."""
        if self._running:
            self._settle()
        if not self._outlived:
            return set()
        with self._condition:
            return {self.epoch} if self._outlived else set()

    def _settle(self) -> None:
        """Compare the digests that are done with the epoch's."""
        with self._condition:
            while self._running and self._running[0][0].done:
                digest, doubts, asked = self._running.pop(0)
                if self._reference is None:
                    self._reference = digest
                elif not digest.same(self._reference):
                    self._outlived = True
                self._verified, self._verified_doubts = asked, doubts
                took = time.monotonic() - self._began
                self._audit_at = time.monotonic() + max(self._audit_s, took / _AUDIT_SHARE)
                self._condition.notify_all()

"""Findings of the doctor, and the system that it reads."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shadowserve.errors import NotInstalledError


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        what: Subject of the check.
        state: ``ok``; ``warning``: works, but slower or less safely; ``failed``: will not work.
        found: Result in words.
        remedy: Proposed action; empty if none is necessary.
    """

    what: str
    state: Literal["ok", "warning", "failed"]
    found: str
    remedy: str = ""

    @classmethod
    def of(
        cls, what: str, sound: bool, found: str, remedy: str, wrong: Literal["warning", "failed"] = "warning"
    ) -> "Finding":
        """Return a finding with state ``ok`` if ``sound``, otherwise ``wrong`` with the remedy."""
        return cls(what, "ok", found) if sound else cls(what, wrong, found, remedy)


@dataclass(frozen=True)
class Machine:
    """The system whose /sys, /proc and /etc are read: this one, or a tree of its files."""

    root: Path

    @property
    def is_this_one(self) -> bool:
        """True if programs may be run, too: they would describe the running system."""
        return self.root == Path("/")

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Return a file's text without surrounding blanks; empty if it is missing or unreadable."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def number(self, name: str) -> int:
        """Return the number in a file; 0 if it is missing."""
        text = self.text(name)
        return int(text) if text.isdigit() else 0

    def find(self, *patterns: str) -> list[Path]:
        """Return the existing files of patterns, in their order."""
        return [path for pattern in patterns for path in sorted(self.root.glob(pattern.lstrip("/")))]

    @property
    def is_bluefield(self) -> bool:
        """True on a BlueField's own system. Its firmware names the chip's parts so, and no other does."""
        return bool(self.find("/sys/bus/platform/devices/MLNXBF*"))


def run_check(check: Iterator[Finding]) -> list[Finding]:
    """Return the findings of a check. An error in it is itself a finding, so that the other checks run."""
    name = getattr(check, "__name__", "check")
    try:
        return list(check)
    except NotInstalledError as error:
        return [Finding(name, "failed", error.missing, error.remedy)]
    except Exception as error:  # the other checks must still run
        return [Finding(name, "failed", f"{type(error).__name__}: {error}", "please report this, with the command")]

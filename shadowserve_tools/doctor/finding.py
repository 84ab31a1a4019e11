"""What the doctor says about one thing, and the system that it looks at."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shadowserve.errors import NotInstalledError


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        what: the thing.
        state: ``ok``; ``warning``: works, but slower or less safe than it could; ``failed``: will not work.
        found: what is there.
        remedy: what to do about it; empty where nothing is to be done.
    """

    what: str
    state: Literal["ok", "warning", "failed"]
    found: str
    remedy: str = ""

    @classmethod
    def of(
        cls, what: str, sound: bool, found: str, remedy: str, wrong: Literal["warning", "failed"] = "warning"
    ) -> "Finding":
        """Return what was found of a thing: ``ok`` if it is sound, else ``wrong``, and what to do about it."""
        return cls(what, "ok", found) if sound else cls(what, wrong, found, remedy)


@dataclass(frozen=True)
class Machine:
    """The system whose /sys, /proc and /etc are read: this one, or a tree that looks like one.

    Attributes:
        root: where that system's root is.
    """

    root: Path

    @property
    def is_this_one(self) -> bool:
        """Whether commands may be asked, too: they would speak of the system that they run on."""
        return self.root == Path("/")

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Return a file's text without blanks around it; empty where it is not there or may not be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def number(self, name: str) -> int:
        """Return the number that a file holds; 0 where it is not there."""
        text = self.text(name)
        return int(text) if text.isdigit() else 0

    def find(self, *patterns: str) -> list[Path]:
        """Return what is there of some file name patterns, in their order."""
        return [path for pattern in patterns for path in sorted(self.root.glob(pattern.lstrip("/")))]

    @property
    def is_bluefield(self) -> bool:
        """Whether it is a BlueField's own system: its firmware names the chip's parts so, and no other's does."""
        return bool(self.find("/sys/bus/platform/devices/MLNXBF*"))


def look(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return what a check finds. One that breaks is itself a finding: the doctor must not fall ill."""
    name = getattr(check, "__name__", "check").strip("_<>")
    try:
        return list(check())
    except NotInstalledError as error:
        return [Finding(name, "failed", error.missing, error.remedy)]
    except Exception as error:  # the whole point is to go on
        return [Finding(name, "failed", f"{type(error).__name__}: {error}", "please report this, with the command")]

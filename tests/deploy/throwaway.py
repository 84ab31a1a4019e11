"""A root to install into and throw away: this machine's own system, with all changes kept in a folder of the test."""

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from machine import NEVER_S
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import shadowserve

REPOSITORY = Path(__file__).parents[2]
OWN = re.compile("shadowserve", re.IGNORECASE)


class Throwaway:
    """The system, and commands that see it.

    Attributes:
        root: where it is, for commands of :meth:`outside`.
        view: where it is for this process, which is not in its mount namespace.
        changes: the folder that holds what differs from this machine; only to be read.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        self.root = folder / "root"
        self.view = Path(f"/proc/{pid}/root{folder}/root")
        self.changes = Path(f"/proc/{pid}/root{folder}/layer/changes")
        self.enter = ["nsenter", "--mount", f"--target={pid}", "--"]

    def outside(self, *command: str | Path, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a command that sees the system below :attr:`root`, as one does who makes an image."""
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, timeout=NEVER_S, check=False)
        assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done

    def inside(self, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return self.outside("chroot", self.root, *command, check=check)

    def install(self, script: Path, *arguments: str | Path, code: int = 0) -> str:
        """Run an installer from outside, as for an image. Return what it prints."""
        done = self.outside(script, "--root", self.root, *arguments, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def own_files(self) -> dict[str, str | bytes]:
        return {name: content for name, content in self.files().items() if OWN.search(name)}

    def files(self) -> dict[str, str | bytes]:
        """Return the written files: path to content, or to where a link leads."""
        found: dict[str, str | bytes] = {}
        for path in sorted(self.changes.rglob("*")):
            name = f"/{path.relative_to(self.changes)}"
            if path.is_symlink():
                found[name] = os.readlink(path)
            elif path.is_file() and "__pycache__" not in path.parts:
                found[name] = path.read_bytes()
        return found


@contextlib.contextmanager
def throwaway(folder: Path) -> Iterator[Throwaway]:
    """Run such a system during the context, in a mount namespace that ends with it.

    Raises:
        PermissionError: one has to be root to mount it.
    """
    if os.geteuid() != 0:
        raise PermissionError("only root may mount a root")
    layer = folder / "layer"
    for name in ("layer", "root"):
        (folder / name).mkdir()
    options = f"lowerdir={layer / 'hidden'}:/,upperdir={layer / 'changes'},workdir={layer / 'scratch'}"
    # In memory: an installation writes ten thousand files, which need no disk. A device 0:0 hides what is below it.
    mount = f"""
        mount -t tmpfs -o size=2g tmpfs {layer} && mkdir -p {layer / "changes"} {layer / "scratch"} &&
        mkdir -p {layer / "hidden/etc"} &&
        {{ [ ! -e /etc/shadowserve ] || mknod {layer / "hidden/etc/shadowserve"} c 0 0; }} &&
        mount -t overlay overlay -o {options} {folder / "root"} &&
        mount -t proc -o ro proc {folder / "root/proc"} && mount --rbind /dev {folder / "root/dev"} &&
        echo mounted && exec sleep infinity
    """
    keeper = subprocess.Popen(
        ["unshare", "--mount", "--propagation=private", "sh", "-c", mount], stdout=subprocess.PIPE, text=True
    )
    try:
        assert keeper.stdout is not None
        if keeper.stdout.readline() != "mounted\n":
            raise PermissionError("no overlay can be mounted here")
        yield Throwaway(folder, keeper.pid)
    finally:
        keeper.kill()
        keeper.communicate()


def make_wheels(folder: Path) -> Path:
    """Write wheels of this checkout and of all that it depends on, from what is installed: no network, no compiler."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", str(REPOSITORY), "--quiet"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    command += ["--config-settings=wheel.cmake=false", f"--config-settings=build-dir={folder / 'build'}"]
    subprocess.run(command, check=True, capture_output=True, timeout=NEVER_S)
    (own,) = folder.glob("shadowserve-*.whl")
    built = (
        "_cffi.py",
        "libshadowserve.so",
        "libdoca_emulator.so",
        "proto/dataplane_pb2.py",
        "proto/dataplane_pb2_grpc.py",
    )
    with zipfile.ZipFile(own, "a") as wheel:  # the build step was left out: add its files, which exist already
        for name in built:
            path = next(path for path in (Path(place, name) for place in shadowserve.__path__) if path.exists())
            wheel.write(path, f"shadowserve/{name}")
    for name in _closure("shadowserve"):
        _repack(importlib.metadata.distribution(name), folder)
    return folder


def _closure(name: str, seen: Mapping[str, None] | None = None) -> dict[str, None]:
    """Return the names of all distributions that one needs to run, directly or not."""
    found: dict[str, None] = dict(seen or {})
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        needed = canonicalize_name(requirement.name)
        if needed not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[needed] = None
            found = _closure(needed, found)
    return found


def _repack(distribution: importlib.metadata.Distribution, folder: Path) -> None:
    """Make the wheel again that a distribution was installed from."""
    tags = re.findall(r"^Tag: (\S+)", distribution.read_text("WHEEL") or "", re.MULTILINE)
    name = re.sub(r"[-_.]+", "_", distribution.metadata["Name"])
    with zipfile.ZipFile(folder / f"{name}-{distribution.version}-{tags[-1]}.whl", "w") as wheel:
        for file in distribution.files or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                wheel.write(str(file.locate()), str(file))

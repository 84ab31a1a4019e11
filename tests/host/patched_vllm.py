"""vLLM with docs/design/vllm-take-back-steps.patch: copies of its schedulers, or its own classes while a test runs."""

import importlib.util
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from machine import WAIT_MAX_S

RELEASE: Final = "0.32.0"
THIS: Final = version("vllm").split("+")[0]
_PATCH: Final = Path(__file__).parents[2] / "docs" / "design" / "vllm-take-back-steps.patch"
_MODULE: Final = "vllm.v1.core.sched.scheduler"
_METHODS: Final = ("_handle_invalid_blocks", "_take_back_requests_with_invalid_blocks")

_OTHER: Final = f"the patch is for vLLM {RELEASE}, this is {THIS}"

needs_release = pytest.mark.skipif(THIS != RELEASE, reason=_OTHER)


def schedulers(folder: Path, *, patched: bool = True) -> tuple[Any, Any]:
    """Return vLLM's classes for synchronous and asynchronous scheduling, from a copy of its sources."""
    import vllm.v1.core.sched.async_scheduler as original

    sources = Path(original.__file__).parent
    copies = folder / Path(*_MODULE.split(".")[:-1])
    copies.mkdir(parents=True)
    for file in ("scheduler.py", "async_scheduler.py"):
        shutil.copyfile(sources / file, copies / file)
    if patched:
        command = ["git", "apply", str(_PATCH)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT_MAX_S, check=False)
        assert done.returncode == 0, done.stderr
    scheduler = _load("copied_scheduler", copies / "scheduler.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, _MODULE, scheduler)
        asynchronous = _load("copied_async_scheduler", copies / "async_scheduler.py")
    return scheduler.Scheduler, asynchronous.AsyncScheduler


def _load(name: str, path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, path)
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def schedule_asynchronously(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Patch vLLM's scheduler, and let engines with the plugin schedule asynchronously, also on CPUs."""
    if THIS != RELEASE:
        pytest.skip(_OTHER)
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.scheduler import Scheduler

    from host_control.vllm import start_check

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = config.kv_transfer_config is not None

    patch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))
    patch.setattr(start_check, "in_step_problem", lambda config: None)
    for name in _METHODS:
        patch.setattr(Scheduler, name, getattr(schedulers(folder / name)[0], name), raising=False)

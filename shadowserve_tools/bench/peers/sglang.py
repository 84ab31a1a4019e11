"""SGLang's engine on a CPU, in processes of its own, from the environment of scripts/test-sglang."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shadowserve.errors import ShadowServeError
from shadowserve_tools.processes import JsonProcess

FOLDER: Final = Path(__file__).parent / "sglang_cpu"
DEFAULT_PYTHON: Final = Path(__file__).resolve().parents[3] / ".venv-sglang" / "bin" / "python"
NOT_INSTALLED: Final = "not installed (scripts/test-sglang)"
START_TIMEOUT_S: Final = 300.0
ANSWER_TIMEOUT_S: Final = 300.0


class SGLang(JsonProcess):
    """A running engine. :mod:`shadowserve_tools.bench.peers.sglang_cpu.engine_process` has its commands.

    Args:
        python: Python of SGLang's environment.
        address: The data plane of ShadowServe's storage backend; None for an engine without that.
        extra: More keys of the backend's configuration.
        arguments: Arguments of ``sglang.Engine``.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        log: Path,
        address: str | None = None,
        extra: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self.log = log
        if address is not None:
            arguments["hicache_storage_backend"] = "dynamic"
            arguments["hicache_storage_backend_extra_config"] = json.dumps(_backend(address) | dict(extra or {}))
        settings = {"model_path": str(model), "max_total_tokens": 8192, "context_length": 2048, "page_size": 16}
        cores = sorted(os.sched_getaffinity(0))
        ranks = arguments.get("tp_size", 1) * arguments.get("pp_size", 1)
        given = {
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
            "PYTHONPATH": str(FOLDER),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [str(python), str(FOLDER / "engine_process.py")]
        super().__init__("SGLang", command, log, given | dict(environment or {}))
        self.send(settings | arguments)
        self.receive(START_TIMEOUT_S)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.send({"do": command, **arguments})
        return self.receive(ANSWER_TIMEOUT_S)

    def generate(self, ids: Sequence[int], **more: Any) -> dict[str, Any]:
        return self.ask("generate", ids=list(ids), **more)

    def flush(self) -> None:
        """Empty the pools of the device and of the host."""
        ends = time.monotonic() + ANSWER_TIMEOUT_S
        while not self.ask("flush")["flushed"]:
            if time.monotonic() > ends:
                raise ShadowServeError("SGLang does not empty its pools")
            time.sleep(0.01)


def _backend(address: str) -> dict[str, Any]:
    """Return the configuration of ShadowServe's backend."""
    return {
        "backend_name": "shadowserve",
        "module_path": "host_control.sglang",
        "class_name": "ShadowServeStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": 16,
        "prefetch_timeout_base": 5,  # a busy machine is not a miss
        "data_plane": address,
        "lookup_timeout_s": 2,
        "identity_cache": "none",
        "breaker_backoff_max_s": 0.2,
    }

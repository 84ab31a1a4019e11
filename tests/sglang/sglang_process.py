"""One SGLang engine in a process of its own (engine_process.py), and helpers for tests."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import wait_for

MIB = 1 << 20


class SGLang:
    """One engine in a process of its own. Attributes: the answer of each command (engine_process.py)."""

    def __init__(self, model: Path, log: Path, address: str | None, extra: Any = None, **arguments: Any) -> None:
        self.log = log
        if address is not None:
            backend = {
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
            arguments["hicache_storage_backend"] = "dynamic"
            arguments["hicache_storage_backend_extra_config"] = json.dumps(backend | (extra or {}))
        settings = {"model_path": str(model), "max_total_tokens": 8192, "context_length": 2048, "page_size": 16}
        cores = sorted(os.sched_getaffinity(0))
        ranks = [str(cores[rank % len(cores)]) for rank in range(arguments.get("tp_size", 1))]
        environment = os.environ | {
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(ranks),
            "PYTHONPATH": str(Path(__file__).parent / "stand_in"),
            "HF_HUB_OFFLINE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [os.environ["SGLANG_PYTHON"], str(Path(__file__).parent / "engine_process.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
            )
        self.ask(settings | arguments)

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the engine has ended: {self.log.read_text()[-3000:]}"
        return dict(json.loads(answer))

    def generate(self, ids: Sequence[int], **more: Any) -> dict[str, Any]:
        return self.ask({"do": "generate", "ids": list(ids), **more})

    def flush(self) -> None:
        """Empty the pools of the device and of the host."""
        wait_for(lambda: self.ask({"do": "flush"})["flushed"])

    def end(self) -> None:
        with self.process:  # closes its standard input, which ends it, and waits
            pass

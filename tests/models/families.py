"""Run all cells of some families: per family an engine without the plugin, one with it, and one of another TP size.

    families.py DESCRIPTOR NAME[,NAME...] CELL[,CELL...]

A process runs one engine at a time. The results of each family are a line of JSON on the descriptor.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

_HERE: Final = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE.parents[1]), str(_HERE.parent), str(_HERE)]

from answers import TOLERANCES, answer  # noqa: E402
from cells import Cell, Reference, Served, Stack, plan, refer  # noqa: E402
from engine import Engine  # noqa: E402
from machine import python_path  # noqa: E402
from published import chunk_tokens, groups  # noqa: E402
from stack import Process  # noqa: E402
from tiny_models import FAMILIES, write_model  # noqa: E402

from shadowserve_tools.processes import start_redis  # noqa: E402

MEMORY_BYTES: Final = 192 << 20
TOKENS_MAX: Final = 16384


class _Run:
    """One family's engines, and what is found of them."""

    def __init__(self, name: str, folder: Path, cells: Sequence[str]) -> None:
        self.name, self.cells, self.family = name, tuple(cells), FAMILIES[name]
        model = write_model(name, folder)
        self.options = {
            "max_model_len": TOKENS_MAX,
            "max_num_batched_tokens": TOKENS_MAX,
            "kv_cache_memory_bytes": MEMORY_BYTES,
            "model": model,
            **self.family.engine_options(model),
        }
        self.dtype = str(self.options.get("dtype", "float32"))
        self.found: dict[str, Any] = {"name": name, "like": self.family.like, "dtype": self.dtype, "cells": {}}
        if self.family.why:
            self.found["options"] = {"given": self.family.engine, "why": self.family.why}

    @contextmanager
    def engine(self, plane: str | None, **options: Any) -> Iterator[Engine]:
        made = {**self.options, **options}
        engine = Engine(made.pop("model"), plane, **made)
        try:
            yield engine
        finally:
            engine.close()

    def without(self) -> Reference:
        with self.engine(None) as engine:
            memory = engine.scheduler.kv_cache_config
            chunk = chunk_tokens(memory)
            self.found |= {
                "groups": groups(memory),
                "chunk_tokens": chunk,
                "blocks": {"without": memory.num_blocks},
            }
            prompts = plan(chunk, self.family.window, TOKENS_MAX, self.cells)
            reference = refer(engine, prompts, TOLERANCES[self.dtype])
        self.found["cells"]["sensitive"] = reference.sensitive.as_json()
        if reference.unsound:
            self.found["vLLM alone"] = reference.unsound
        return reference

    def served(self, reference: Reference, stack: Stack) -> None:
        extra = {"chunk_tokens": reference.plan.chunk}
        with self.engine(stack.plane.address, extra=extra) as engine:
            self.found["blocks"]["with"] = engine.scheduler.kv_cache_config.num_blocks
            self.found["off"] = engine.problem
            served = Served(engine, reference, stack)
            if "another TP size" in self.cells:
                served.stored("another TP size")  # by one rank, for two to find
            for cell in self.cells:
                if cell in ("sensitive", "another TP size"):
                    continue
                self.note(cell, served.run(cell))
        stack.restore()  # for another TP size to find the stored records

    def note(self, name: str, cell: Cell) -> None:
        self.found["cells"][name] = cell.as_json()
        print(f"{self.name:12} {name:26} {json.dumps(cell.as_json())}", flush=True)

    def other_size(self, reference: Reference, stack: Stack) -> Cell:
        """Run two ranks over what one has stored, then over what they have."""
        name = "another TP size"
        os.environ["PYTHONPATH"] = python_path()
        options = {"tensor_parallel_size": 2}
        if self.dtype != "float32":  # each rank rounds its own sums
            with self.engine(None, **options) as engine:
                reference.alone[name] = answer(engine, reference.plan.alone[name])
        extra = {"chunk_tokens": reference.plan.chunk}
        with self.engine(stack.plane.address, extra=extra, **options) as engine:
            served = Served(engine, reference, stack)
            cell = served.again(name, Cell(), hits=False)
            of_one = cell.hit
            engine.flush()
            engine.forget()
            cell = served.again(name, cell)
        if cell.outcome == "failed":
            with self.engine(None, **options) as engine:
                reference.compare(
                    name, reference.alone[name], answer(engine, reference.plan.alone[name]), "on two ranks"
                )
            if name in reference.unsound:
                return Cell("not possible", reference.unsound[name])
        if cell.outcome == "passed" and not served.problem:
            cell.why = f"{of_one} tokens of what one rank had stored, {cell.hit} of what two had"
        return cell

    def all(self, stack: Stack) -> dict[str, Any]:
        """Run everything; what vLLM cannot run is said with its reason."""
        began = time.process_time()
        try:
            reference = self.without()
        except Exception as error:
            return self.found | {"does not run": _said(error)}
        try:
            stack.restore()
            self.served(reference, stack)
        except Exception as error:
            return self.found | {"failed": _said(error)}
        if "another TP size" in self.cells:
            try:
                cell = self.other_size(reference, stack)
            except Exception as error:
                cell = Cell("not possible", f"vLLM does not run two ranks: {_said(error)}")
            self.note("another TP size", cell)
        return self.found | {"seconds": round(time.process_time() - began, 1)}


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


@contextmanager
def _stack(folder: Path) -> Iterator[Stack]:
    with ExitStack() as ends:
        storage = Process("storage", "--port", "0")
        ends.callback(storage.stop)
        try:
            redis = ends.enter_context(start_redis(folder)).address
        except Exception as error:
            print(error, file=sys.stderr)
            redis = ""
        stack = Stack(storage.address, redis)
        ends.callback(lambda: stack.plane.stop())
        yield stack


def main(arguments: Sequence[str]) -> int:
    """Tell what is found of each family, a line of JSON each, to a descriptor."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order: it has processes of its own
    descriptor, names, cells = arguments
    with tempfile.TemporaryDirectory(prefix="models-") as folder, _stack(Path(folder)) as stack:
        for name in names.split(","):
            result = json.dumps(_Run(name, Path(folder, name), cells.split(",")).all(stack))
            os.write(int(descriptor), f"{result}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

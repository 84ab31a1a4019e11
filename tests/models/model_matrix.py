"""The matrix of models: runs every family, and writes all results as JSON and a table of the families."""

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from cells import CELLS
from machine import WAIT_MAX_S
from published import PUBLISHED, found
from tiny_models import FAMILIES

HERE: Final = Path(__file__).parent
FAMILY_TIMEOUT_S: Final = 1800.0
"""Bound for one family: it starts four engines, and each takes a minute on a busy machine."""
_OUTCOMES: Final = ("passed", "failed", "not possible")


def run_families(
    names: Sequence[str], cells: Sequence[str], timeout: float = FAMILY_TIMEOUT_S
) -> Iterator[dict[str, Any]]:
    """Yield the results of each family. A family that ends its process has failed; the others continue."""
    left = list(names)
    while left:
        for family in _run(tuple(left), cells, timeout):
            left.remove(family["name"])
            yield family


def _run(names: Sequence[str], cells: Sequence[str], timeout: float) -> Iterator[dict[str, Any]]:
    """Run families in a process until one of them ends it."""
    reader, writer = os.pipe()
    command = [sys.executable, str(HERE / "families.py"), str(writer), ",".join(names), ",".join(cells)]
    with tempfile.TemporaryFile() as log, os.fdopen(reader, "rb", 0) as found:
        process = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[writer], process_group=0)
        os.close(writer)
        try:
            for name in names:
                ready, _, _ = select.select([found], [], [], timeout)
                if line := found.readline() if ready else b"":
                    yield json.loads(line)
                    continue
                why = f"its process ended with {process.wait()}" if ready else f"it did not end within {timeout:.0f} s"
                log.seek(max(log.seek(0, os.SEEK_END) - 3000, 0))
                end = log.read().decode(errors="replace")
                yield {"name": name, "like": FAMILIES[name].like, "cells": {}, "failed": why, "log": end}
                return
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a family's process, so that it ends its own children. Then kill the remaining processes."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(WAIT_MAX_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failed(family: dict[str, Any]) -> bool:
    """Return True if a result of vLLM with the plugin differs from one without it."""
    blocks = family.get("blocks", {})
    return bool(
        family.get("failed")
        or any(cell["outcome"] == "failed" for cell in family["cells"].values())
        or blocks.get("with", blocks.get("without")) != blocks.get("without")
    )


_SUMMARY: Final = """\
# Models

ShadowServe caches every layer type for which vLLM's own prefix cache works: full attention, MLA, sliding windows,
chunked local attention, recurrent state (Mamba, GDN, KDA, short convolutions), and draft layers (EAGLE, MTP). A hit is
as long as vLLM's own prefix cache would make it. Encoder-decoder models are refused by vLLM with any KV connector.
[The plugin's README](../../host_control/README.md) lists configurations that are served without the cache.

## Tested families

`make models` runs a tiny model of each family with random weights in vLLM {vllm} on a CPU: without the plugin, with
it over a real storage node and data plane, and on two ranks. Tokens and logprobs must be equal in cells for chunk
boundaries, windows, long prompts, preemption, aborts, lost and damaged records, a killed data plane and another TP
size. *Hits* are tokens that came from the store, relative to vLLM's own prefix cache; a dash means that vLLM's CPU
build cannot cache this family, for the reason given. `build/models/` then has all results.

| family | like | hits | note |
|---|---|---|---|
{families}

## Published models that no CPU runs

Their values in vLLM's own spec classes, grouped by vLLM's rules, and how the plugin stores them
(`tests/models/published.py`).

| model | layers | groups: kind, layers, tokens of a block, bytes of a block | the plugin |
|---|---|---|---|
{published}
"""


def as_summary(data: dict[str, Any]) -> str:
    """Return docs/reference/models.md: the supported families, and how published models are stored."""
    return _SUMMARY.format(
        vllm=data["vllm"],
        families="\n".join(_family_row(family) for family in data["families"]),
        published="\n".join(published_row(model) for model in data["published"]),
    )


def published_row(model: dict[str, Any]) -> str:
    return f"| {model['name']} | {model['of']} | {_groups(model)} | {_cell(model['off'] or model['kept'])} |"


def _groups(model: dict[str, Any]) -> str:
    """Return the groups; equal ones once, with their number."""
    said: dict[str, int] = {}
    for group in model["groups"]:
        window = f" {group['window']:,}" if group.get("window") else ""
        draft = ", draft" if group.get("draft") else ", scratch" if group.get("scratch") else ""
        size = f"{group['block_tokens']} × {group['block_bytes']:,} B"
        text = f"{group['kind']}{window} × {group['layers']}, {size}{draft}"
        said[text] = said.get(text, 0) + 1
    return "; ".join(f"{count} of {text}" if count > 1 else text for text, count in said.items())


def _family_row(family: dict[str, Any]) -> str:
    begin = f"| {family['name']} | {family['like']} | "
    if family.get("does not run"):
        return f"{begin}– | {_cell('vLLM does not run it on a CPU: ' + family['does not run'])} |"
    asked = [cell for cell in family["cells"].values() if cell.get("own") is not None]
    chunk = family.get("chunk_tokens", 1)
    own = sum(cell["own"] // chunk * chunk for cell in asked)
    share = f"{sum(min(cell['hit'], cell['own']) for cell in asked) / own:.0%}" if own else "–"
    given = family.get("options")
    options = f"with {json.dumps(given['given'])[1:-1]}: {given['why']}" if given else ""
    why = "; ".join(filter(None, [family.get("failed") or family.get("off", ""), options]))
    return f"{begin}{share} | {_cell(why)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _write(folder: Path, summary: Path | None, data: dict[str, Any], family: dict[str, Any]) -> None:
    """Write the results with one family's new row, and the summary if the results have all families."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "models.json"
    kept = json.loads(path.read_text())["families"] if path.exists() else []
    families = {each["name"]: each for each in kept} | {family["name"]: family}
    data = {"command": "make models", **data, "families": [families[name] for name in FAMILIES if name in families]}
    path.write_text(json.dumps(data, indent=1) + "\n")
    if summary is not None and len(data["families"]) == len(FAMILIES):
        summary.write_text(as_summary(data))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the families. Return 1 if an answer with the plugin differs from the engine's own."""
    import importlib.metadata

    parser = argparse.ArgumentParser(description="Compare vLLM with the plugin and without it, family by family.")
    parser.add_argument("names", nargs="*", help="families; by default all")
    parser.add_argument("--list", action="store_true", help="list the families and cells")
    parser.add_argument("--cells", default=",".join(CELLS), help="comma-separated cells; by default all")
    parser.add_argument("--output", type=Path, help="folder for all results; a run of some families changes their rows")
    parser.add_argument(
        "--summary", type=Path, help="file for the summary, once the folder has results of all families"
    )
    options = parser.parse_args(arguments)
    names = options.names or list(FAMILIES)
    if unknown := [*({*names} - {*FAMILIES}), *({*options.cells.split(",")} - {*CELLS})]:
        parser.error(f"unknown: {', '.join(unknown)}; --list prints the known names")
    if options.list:
        print("\n".join([f"{name:12} {family.like}" for name, family in FAMILIES.items()]), "", *CELLS, sep="\n")
        return 0
    published = [found(model) for model in PUBLISHED]
    well = True
    began = time.monotonic()
    for family in run_families(names, options.cells.split(",")):
        print(_told(family, time.monotonic() - began), flush=True)
        began = time.monotonic()
        well = well and not failed(family)
        if options.output is not None:
            data = {"vllm": importlib.metadata.version("vllm"), "published": published}
            _write(options.output, options.summary, data, family)
    return int(not well)


def _told(family: dict[str, Any], seconds: float) -> str:
    outcomes = [cell["outcome"] for cell in family["cells"].values()]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in _OUTCOMES)
    lines = [f"{family['name']:12} {seconds:5.0f} s  {counts}"]
    lines += [f"    {key}: {family[key][:300]}" for key in ("off", "does not run", "failed") if family.get(key)]
    for name, cell in family["cells"].items():
        if cell["outcome"] != "passed":
            lines.append(f"    {name}: {cell['outcome']}: {cell['why']}")
    return "\n".join(lines + [family.get("log", "")]).rstrip()

"""The matrix of models: every family, one after the other; a table and a JSON file written."""

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

__all__ = ["as_text", "main", "run_families"]

HERE: Final = Path(__file__).parent
FAMILY_TIMEOUT_S: Final = 1800.0
"""For one family: it starts four engines, and a machine that is used by others takes a minute for each."""
_SHORT: Final = {"passed": "yes", "failed": "**no**", "not possible": "–"}


def run_families(
    names: Sequence[str], cells: Sequence[str], timeout: float = FAMILY_TIMEOUT_S
) -> Iterator[dict[str, Any]]:
    """Yield what is found of each family; one that ends the process that runs it has failed, and others go on."""
    left = list(names)
    while left:
        for family in _run(tuple(left), cells, timeout):
            left.remove(family["name"])
            yield family


def _run(names: Sequence[str], cells: Sequence[str], timeout: float) -> Iterator[dict[str, Any]]:
    """Run families in a process, until one ends it."""
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
    """End a family's process, so that it ends what it has started; then whatever is left."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(WAIT_MAX_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failed(family: dict[str, Any]) -> bool:
    """Whether anything that vLLM can do without the plugin is otherwise with it."""
    blocks = family.get("blocks", {})
    return bool(
        family.get("failed")
        or any(cell["outcome"] == "failed" for cell in family["cells"].values())
        or blocks.get("with", blocks.get("without")) != blocks.get("without")
    )


_HEAD: Final = """\
# Which models are served, and how that is known

Written by `make models`. For each family a tiny model with random weights is made (`tests/models/tiny_models.py`), in
float32 but where vLLM's CPU kernels take bfloat16 alone, and run with vLLM {vllm} on a CPU: first without the plugin,
then with it, over the real storage server and data plane. Every answer, its tokens and logprobs, is compared with that
of the engine without the plugin. `docs/models.json` has every number.

## Families

| family | like | groups: kind, layers, tokens of a block | hits | why not |
|---|---|---|---|---|
{families}

**hits**: of the tokens that vLLM's own prefix cache would have had in whole chunks, those that came from the store,
over all cells that ask a prompt twice.

## Cells

**yes**: the answers are those of the engine without the plugin, and where the plugin is on, a hit is as long as vLLM's
own prefix cache would have it. The number is the hit's tokens. –: not possible here, see below; empty: not run.
*sensitive* is the engine without the plugin: with another first chunk, and with another last chunk of a hit, it must
answer otherwise, by more than is let pass for rounding.

{cells}

{notes}

## Bytes and blocks

What a prompt of more than 128 chunks leaves in the store, as the engine holds it and as records; and what of it a hit
can ever need, by each group's own rule in vLLM (`reachable_block_mask`): where hits may end at any boundary, and where
they end with the prompt. Blocks and tokens are those of the engine's KV cache, without and with the plugin.

| family | stored a token | as records | needed, anywhere | needed, at its end | moved a token | blocks | tokens |
|---|---|---|---|---|---|---|---|
{bytes}

## Models that no CPU runs

vLLM's own spec classes, filled with the values of published configurations and grouped by vLLM's own rules
(`get_kv_cache_groups`), on one GPU: `tests/models/published.py`. What the plugin says of them is asked of the same
function as in an engine.

| model | of | groups: kind, layers, tokens of a block, bytes of a block | the plugin |
|---|---|---|---|
{published}

Encoder-decoders (Whisper) do not start beside any KV connector: vLLM's scheduler refuses.
"""


def as_text(data: dict[str, Any]) -> str:
    """Return docs/models.md."""
    ran = [family for family in data["families"] if not family.get("does not run")]
    return _HEAD.format(
        vllm=data["vllm"],
        families="\n".join(_family_row(family) for family in data["families"]),
        cells="\n".join(_cell_table(ran)),
        notes="\n".join(_notes(data["families"])),
        bytes="\n".join(_bytes_row(family) for family in ran),
        published="\n".join(
            f"| {model['name']} | {model['of']} | {_groups(model, sizes=True)} "
            f"| {_cell(model['off'] or model['kept'])} |"
            for model in data["published"]
        ),
    )


def _groups(family: dict[str, Any], *, sizes: bool = False) -> str:
    """Return the groups, alike ones once, with their number."""
    said: dict[str, int] = {}
    for group in family.get("groups", []):
        window = f" {group['window']:,}" if group.get("window") else ""
        draft = ", draft" if group.get("draft") else ", scratch" if group.get("scratch") else ""
        size = f" × {group['block_bytes']:,} B" if sizes else ""
        text = f"{group['kind']}{window} × {group['layers']}, {group['block_tokens']}{size}{draft}"
        said[text] = said.get(text, 0) + 1
    return "; ".join(f"{count} of {text}" if count > 1 else text for text, count in said.items())


def _family_row(family: dict[str, Any]) -> str:
    if family.get("does not run"):
        said = f"vLLM's CPU build does not run it: {family['does not run']}"
        return f"| {family['name']} | {family['like']} | {_groups(family)} | – | {_cell(said)} |"
    asked = [cell for cell in family["cells"].values() if cell.get("own") is not None]
    chunk = family.get("chunk_tokens", 1)
    own = sum(cell["own"] // chunk * chunk for cell in asked)
    share = f"{sum(min(cell['hit'], cell['own']) for cell in asked) / own:.0%}" if own else "–"
    given = family.get("options")
    options = f"with {json.dumps(given['given'])[1:-1]}: {given['why']}" if given else ""
    why = "; ".join(filter(None, [family.get("failed") or family.get("off", ""), options]))
    return f"| {family['name']} | {family['like']} | {_groups(family)} | {share} | {_cell(why)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _cell_table(families: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"| cell | {' | '.join(family['name'] for family in families)} |",
        "|---|" + "---|" * len(families),
    ]
    for name in CELLS:
        shown = []
        for family in families:
            cell = family["cells"].get(name, {})  # nothing: nobody asked for it
            hit = f" {cell['hit']:,}" if cell.get("hit") is not None else ""
            shown.append(f"{_SHORT.get(cell.get('outcome', ''), '')}{hit}")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return lines


def _notes(families: list[dict[str, Any]]) -> list[str]:
    """Return why cells are not possible or failed, families with the same reason together."""
    said: dict[tuple[str, str], list[str]] = {}
    for family in families:
        alone = family.get(
            "vLLM alone", {}
        )  # what it answers otherwise is said even where the plugin has no part in it
        reasons = {name: {"outcome": "not possible", "why": why} for name, why in alone.items()}
        for name, cell in (reasons | {key: cell for key, cell in family["cells"].items() if cell.get("why")}).items():
            said.setdefault((f"{name}: {cell['why']}", cell["outcome"]), []).append(family["name"])
    lines = []
    for (text, outcome), names in said.items():
        bold = "**failed** " if outcome == "failed" else ""
        lines.append(f"- {bold}{_cell(text)} ({', '.join(names)})")
    return lines


def _bytes_row(family: dict[str, Any]) -> str:
    stored, needed = family.get("stored", {}), family.get("needed", {})

    def a_token(count: Any, tokens: Any) -> str:
        return f"{count / tokens:,.0f} B" if count and tokens else "–"

    tokens = stored.get("tokens", 0)
    cells = [
        a_token(stored.get("raw"), tokens),
        a_token(stored.get("records"), tokens),
        a_token(needed.get("anywhere"), needed.get("tokens")),
        a_token(needed.get("at its end"), needed.get("tokens")),
        a_token(stored.get("moved"), stored.get("loaded")),
        f"{family.get('blocks', {}).get('without', '–')}, {family.get('blocks', {}).get('with', '–')}",
        f"{family.get('tokens', {}).get('without', '–')}, {family.get('tokens', {}).get('with', '–')}",
    ]
    return f"| {family['name']} | {' | '.join(cells)} |"


def _write(folder: Path, data: dict[str, Any], family: dict[str, Any]) -> None:
    """Write the matrix that is kept, with what was found of one family now: each is worth minutes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "models.json"
    kept = json.loads(path.read_text())["families"] if path.exists() else []
    families = {each["name"]: each for each in kept} | {family["name"]: family}
    data = {"command": "make models", **data, "families": [families[name] for name in FAMILIES if name in families]}
    path.write_text(json.dumps(data, indent=1) + "\n")
    (folder / "models.md").write_text(as_text(data))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the families; return 1 if any answer with the plugin is not the engine's own."""
    import importlib.metadata

    parser = argparse.ArgumentParser(description="Compare vLLM with the plugin and without it, family by family.")
    parser.add_argument("names", nargs="*", help="families; by default all")
    parser.add_argument("--list", action="store_true", help="say which families and cells there are")
    parser.add_argument("--cells", default=",".join(CELLS), help="by default all, with commas between them")
    parser.add_argument("--output", type=Path, help="folder of models.md and .json; of some families their rows change")
    options = parser.parse_args(arguments)
    names = options.names or list(FAMILIES)
    if unknown := [*({*names} - {*FAMILIES}), *({*options.cells.split(",")} - {*CELLS})]:
        parser.error(f"unknown: {', '.join(unknown)}; --list says which there are")
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
            _write(options.output, {"vllm": importlib.metadata.version("vllm"), "published": published}, family)
    return int(not well)


def _told(family: dict[str, Any], seconds: float) -> str:
    outcomes = [cell["outcome"] for cell in family["cells"].values()]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in _SHORT)
    lines = [f"{family['name']:12} {seconds:5.0f} s  {counts}"]
    lines += [f"    {key}: {family[key][:300]}" for key in ("off", "does not run", "failed") if family.get(key)]
    for name, cell in family["cells"].items():
        if cell["outcome"] == "failed":
            lines.append(f"    {name}: {cell['why']}")
    return "\n".join(lines + [family.get("log", "")]).rstrip()

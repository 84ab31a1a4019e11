"""``shadowserve demo``: the main job, end to end, with real parts as separate processes.

A storage server, a data plane and a vLLM server with the plugin; questions about long documents; then a second vLLM
server that has never seen them, which fetches what the first one computed.
"""

import contextlib
import http.client
import importlib.metadata
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from host_control.client import DataPlaneClient
from shadowserve.errors import ShadowServeError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve.native import BACKENDS
from shadowserve_tools.bench.parts.serving import p95
from shadowserve_tools.charts import Chart, draw
from shadowserve_tools.demo_model import OWN_MODEL, default_model
from shadowserve_tools.processes import Child, free_port, http_request, start_data_plane, start_storage, started
from shadowserve_tools.report import Output, output_options

SERVED_NAME: Final = "demo"
QUIET_S: Final = 3.0
"""Without a change in what is stored: then all of it is. A busy machine can pause longer than a store takes."""
QUESTIONS: Final = (
    "What is this text about?",
    "Which title fits this text?",
    "Give an example of its use.",
    "What should one take care of?",
)
FIRST: Final = ("debugger", "strings", "import", "try", "comparisons", "function", "async", "naming")
"""The first documents: pages of the Python reference that are prose."""
PLAIN: Final = ("{document}", "\n\nQuestion: {question}\nAnswer:", "")
CHAT: Final[tuple[str, str, None]] = (
    "<|im_start|>system\nYou answer questions about a text.<|im_end|>\n<|im_start|>user\nText:\n{document}",
    "\n\nQuestion: {question}\nAnswer in one short sentence.<|im_end|>\n<|im_start|>assistant\n",
    None,
)
"""Parts of a prompt: its beginning, each question, and the text between an answer and the next question.

CHAT is SmolLM2's own form. Each of its prompts has one question: such a small model would repeat its last answer.
"""
CHAT_TOKENS_MAX: Final = 8192
BAR_WIDTH: Final = 18
_SERVING: Final = re.compile(r"Application startup complete")


_LISTS: Final = ("name", "ttft_s", "outputs", "asked")


@dataclass
class Phase:
    """Results of one engine's requests.

    Attributes:
        ttft_s: Time to the first token of each request, as the client measures it.
        outputs: Output token ids of each request.
        asked: Document, question, answer and loaded tokens of each request.
        tokens_cacheable: Prompt tokens in complete chunks that the engine's own prefix cache does not have.
        tokens_fetched: Tokens whose KV came from the storage node through the data plane.
        bytes_raw: KV bytes in the engine's dtype that the data plane moved in either direction.
        bytes_stored, bytes_fetched: Bytes of records, compressed.
    """

    name: str
    ttft_s: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    asked: list[tuple[str, str, str, int]] = field(default_factory=list)
    tokens_prompt: int = 0
    tokens_cacheable: int = 0
    tokens_computed: int = 0
    tokens_fetched: int = 0
    bytes_raw: int = 0
    bytes_stored: int = 0
    bytes_fetched: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the phase as the demo's JSON has it."""
        values = {key: value for key, value in asdict(self).items() if key not in _LISTS}
        times = {"ttft_mean_s": statistics.fmean(self.ttft_s), "ttft_p95_s": p95(self.ttft_s)}
        return {"name": self.name, "requests": len(self.ttft_s), **times, **values}


@click.command(context_settings={"show_default": True})
@click.option(
    "--model",
    help="Model that vLLM loads.  [default: SmolLM2-135M-Instruct if installed, else the project's own small Llama]",
)
@click.option("--documents", default=4, type=click.IntRange(1, 64), help="Number of documents.")
@click.option("--document-bytes", default=6000, type=click.IntRange(1024), help="Bytes of a document.")
@click.option("--turns", default=2, type=click.IntRange(1, len(QUESTIONS)), help="Questions about each document.")
@click.option("--output-tokens", default=32, type=click.IntRange(1), help="Most tokens of an answer.")
@click.option("--dtype", default="float32", help="Dtype of the engine; single precision makes outputs comparable.")
@click.option("--quantizer", default="lossless", type=click.Choice(["lossless", "binned"]))
@click.option("--bins", default=64, type=click.Choice([16, 32, 64]), help="Bins of keys, for binned.")
@click.option(
    "--backend", default="software", type=click.Choice(BACKENDS),
    help="Backend of the data plane. Without a DPU, doca is an emulator.",
)  # fmt: skip
@click.option("--keep-logs", type=click.Path(file_okay=False), help="Folder for the logs of all processes.")
@output_options
def demo(keep_logs: str | None, output: Output, **options: Any) -> None:
    """Store KV with one engine, load it with another one, and show the difference. All parts are real.

    Starts a storage node, a data plane and vLLM with the plugin, and asks questions about pages of the Python
    reference. Then it starts a second vLLM and asks the same again. The exit code is 1 if the second engine's outputs
    differ (with a lossless quantizer) or if it computed stored tokens.
    """
    if not shutil.which("vllm", path=_path()):
        raise ShadowServeError("the demo needs vLLM, and there is no 'vllm' command: run 'make setup' in a checkout")
    console = Console()
    options["chat"] = False
    if options["model"] is None:
        options["model"] = str(default_model(console))
        options["chat"] = options["model"] != str(OWN_MODEL)
    with contextlib.ExitStack() as stack:
        logs = Path(keep_logs) if keep_logs else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)
        storage = stack.enter_context(start_storage(logs))
        data_plane = stack.enter_context(start_data_plane(logs, storage.address, "--backend", options["backend"]))
        total = 2 * options["documents"] * options["turns"]
        progress = stack.enter_context(Progress(console=console, transient=True))
        task = progress.add_task("starting", total=total)
        plane = stack.enter_context(contextlib.closing(DataPlaneClient(data_plane.address, connect_timeout_s=10)))
        phases, stages = [], None
        for name in ("cold", "warm"):
            progress.update(task, description=f"{name}: starting vLLM")
            with _engine(name, data_plane, logs, options) as url:
                phase = Phase(name)
                before = plane.statistics()
                for number, _ in enumerate(_serve(url, phase, options), start=1):
                    progress.update(task, advance=1, description=f"{name}: request {number} of {total // 2}")
                stages = _settle(plane)
                phase.bytes_raw = stages.delivered_bytes - before.delivered_bytes
                phase.bytes_raw += stages.stored_raw_bytes - before.stored_raw_bytes
                phase.bytes_stored = stages.stored_bytes - before.stored_bytes
                phase.bytes_fetched = stages.fetched_bytes - before.fetched_bytes
            phases.append(phase)
    if output.plot_file:
        _plot(phases, output.plot_file)
    _report(console, phases, stages, options, output)


def _path() -> str:
    """The search path with our own environment first, so that its vLLM is the one that runs."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


@contextlib.contextmanager
def _engine(name: str, data_plane: Child, logs: Path, options: dict[str, Any]) -> Iterator[str]:
    """Run ``vllm serve`` with the plugin, as the README says, and yield its URL."""
    port = free_port()
    transfer = {
        "kv_connector": "ShadowServeConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "data_plane": data_plane.address,
            "quantizer": options["quantizer"],
            # All programs share a few cores, so that timeouts must be long.
            **dict.fromkeys(("lookup_timeout_s", "connect_timeout_s", "fetch_timeout_s", "store_timeout_s"), 60.0),
            **({"bins": options["bins"]} if options["quantizer"] == "binned" else {}),
        },
    }
    length = options["document_bytes"] + options["turns"] * (options["output_tokens"] * 3 + 128)
    length = min(length, CHAT_TOKENS_MAX) if options["chat"] else length
    command = ["vllm", "serve", options["model"], "--served-model-name", SERVED_NAME, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", options["dtype"], "--max-model-len", str(length), "--seed", "0"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    if "+cpu" in importlib.metadata.version("vllm"):
        command += ["--block-size", "32", "--enforce-eager", "--max-num-seqs", "8"]
        command += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(512 << 20)]
    environment = {"HF_HUB_OFFLINE": "1"} if Path(options["model"]).is_dir() else {}
    environment |= {"PATH": _path(), "VLLM_NO_USAGE_STATS": "1"}
    with started(f"vllm-{name}", command, logs, ready=_SERVING, environment=environment, timeout_s=600):
        yield f"http://127.0.0.1:{port}"


def _documents(options: dict[str, Any]) -> list[tuple[str, str]]:
    """Return pages of the reference that every Python installation has: name and text."""
    size = options["document_bytes"]
    names = [*FIRST, *sorted(set(topics) - set(FIRST))]
    pages = [(name, topics[name].encode("ascii", "ignore").decode()[:size]) for name in names if name in topics]
    long = [page for page in pages if len(page[1]) > size // 2]
    if len(long) < options["documents"]:
        raise ShadowServeError(f"Python's reference has {len(long)} pages of that length; use fewer --documents")
    return long[: options["documents"]]


def _serve(url: str, phase: Phase, options: dict[str, Any]) -> Iterator[None]:
    """Serve the conversations, one request at a time, and fill in the phase; yields after each request."""
    begin, ask, answered = CHAT if options["chat"] else PLAIN
    for name, document in _documents(options):
        text = begin.format(document=document)
        for question in QUESTIONS[: options["turns"]]:
            prompt = text + ask.format(question=question)
            before = _prompt_tokens(url)
            answer = _complete(url, phase, prompt, options)
            sources = {key: value - before.get(key, 0) for key, value in _prompt_tokens(url).items()}
            count = sum(sources.values())
            chunked = min(count // DEFAULT_CHUNK_TOKENS * DEFAULT_CHUNK_TOKENS, count - 1)
            loaded = sources.get("external_kv_transfer", 0)
            phase.tokens_prompt += count
            phase.tokens_cacheable += max(0, chunked - sources.get("local_cache_hit", 0))
            phase.tokens_computed += sources.get("local_compute", 0)
            phase.tokens_fetched += loaded
            phase.asked.append((name, question, answer.strip(), loaded))
            text = text if answered is None else prompt + answer + answered
            yield


@contextlib.contextmanager
def _request(url: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
    """Send a GET, or a POST with a body, to vLLM."""
    try:
        with http_request(url, body, timeout_s=300) as response:
            yield response
    except urllib.error.HTTPError as error:
        raise ShadowServeError(f"vLLM answered {error.code}: {error.read()[:500]!r}") from error
    except (OSError, http.client.HTTPException) as error:
        raise ShadowServeError(
            f"vLLM at {url} does not answer: {error}; its log has the reason (--keep-logs)"
        ) from error


def _complete(url: str, phase: Phase, prompt: str, options: dict[str, Any]) -> str:
    body = {
        "model": SERVED_NAME,
        "prompt": prompt,
        "max_tokens": options["output_tokens"],
        "temperature": 0,
        "ignore_eos": not options["chat"],
        "stream": True,
        "return_token_ids": True,
    }
    begin, first, text = time.monotonic(), None, ""
    tokens: list[int] = []
    with _request(f"{url}/v1/completions", body) as response:
        for line in response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise ShadowServeError(f"vLLM failed a request: {event['error']}")
            for choice in event["choices"]:
                first = first or time.monotonic()
                text += choice["text"]
                tokens += choice.get("token_ids") or []
    if first is None or not tokens:
        raise ShadowServeError("vLLM answered without a token")
    phase.ttft_s.append(first - begin)
    phase.outputs.append(tokens)
    return text


def _prompt_tokens(url: str) -> dict[str, int]:
    with _request(f"{url}/metrics") as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = (sample for family in families for sample in family.samples)
    counted = (sample for sample in samples if sample.name == "vllm:prompt_tokens_by_source_total")
    return {sample.labels["source"]: int(sample.value) for sample in counted}


def _settle(plane: DataPlaneClient) -> Any:
    """Return the data plane's statistics once it has stored everything: when they no longer change."""
    deadline, last, quiet_since = time.monotonic() + 60, plane.statistics(), time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - quiet_since < QUIET_S:
        time.sleep(0.1)
        now = plane.statistics()
        if now.stored_bytes != last.stored_bytes:
            quiet_since = time.monotonic()
        last = now
    return last


def _plot(phases: list[Phase], file: Path) -> None:
    labels = [f"{name}: {question}" for name, question, _, _ in phases[0].asked]
    named = zip(("computed", "loaded"), phases, strict=True)
    times = {name: list(zip(labels, phase.ttft_s, strict=True)) for name, phase in named}
    chart = Chart("Time to first token of each question", x="", y="seconds", series=times, kind="bars")
    draw("shadowserve demo", [chart], file)


def _picture(phases: list[Phase], *, answers: bool) -> Table:
    """Return each question with its answer, and its two times as bars."""
    table = Table("Python reference", "time to first token: computed, loaded", "tokens loaded", show_lines=True)
    longest = max(time for phase in phases for time in phase.ttft_s)
    rows = zip(phases[1].asked, *(phase.ttft_s for phase in phases), strict=True)
    for (name, question, answer, loaded), *times in rows:
        bars = Text("\n").join(
            Text(f"{'█' * max(1, round(BAR_WIDTH * time / longest))} {time:.2f} s", style)
            for time, style in zip(times, ("yellow", "green"), strict=True)
        )
        said = Text(f"\n{answer}", "italic") if answers else Text()
        table.add_row(Text.assemble((f"{name}: ", "bold"), question, said), bars, f"{loaded:,d}")
    return table


def _report(console: Console, phases: list[Phase], stages: Any, options: dict[str, Any], output: Output) -> None:
    cold, warm = (phase.summary() for phase in phases)
    table = Table("", *(phase.name for phase in phases), title="Two engines, the same conversations")
    for label, key, unit, form in (
        ("requests", "requests", 1, "{:d}"),
        ("TTFT mean, s", "ttft_mean_s", 1, "{:.3f}"),
        ("TTFT p95, s", "ttft_p95_s", 1, "{:.3f}"),
        ("prompt tokens", "tokens_prompt", 1, "{:,d}"),
        ("  in chunks, not held by the engine", "tokens_cacheable", 1, "{:,d}"),
        ("  computed", "tokens_computed", 1, "{:,d}"),
        ("  fetched", "tokens_fetched", 1, "{:,d}"),
        ("KV moved, MB raw", "bytes_raw", 1e6, "{:.1f}"),
        ("stored, MB", "bytes_stored", 1e6, "{:.1f}"),
        ("fetched, MB", "bytes_fetched", 1e6, "{:.1f}"),
    ):
        values = (phase[key] if unit == 1 else phase[key] / unit for phase in (cold, warm))
        table.add_row(label, *map(form.format, values))
    console.print(_picture(phases, answers=options["model"] != str(OWN_MODEL)))
    console.print(table)
    console.print(_stage_table(stages))
    agree = phases[0].outputs == phases[1].outputs
    ratio = cold["ttft_mean_s"] / warm["ttft_mean_s"]
    share = warm["tokens_fetched"] / max(1, warm["tokens_cacheable"])
    saved = f"{warm['tokens_fetched']:,d} tokens loaded instead of computed ({share:.1%} of those in chunks)"
    console.print(f"TTFT: {ratio:.1f} times lower; {saved}.", soft_wrap=True)
    console.print(f"Outputs {'agree, token by token' if agree else 'DIFFER'}.")
    if output.json_file:
        asked = [
            dict(zip(("document", "question", "answer", "loaded_tokens"), each, strict=True))
            | {"ttft_cold_s": before, "ttft_warm_s": after}
            for each, before, after in zip(phases[1].asked, phases[0].ttft_s, phases[1].ttft_s, strict=True)
        ]
        table_data = {"backend": stages.backend, "phases": [cold, warm], "asked": asked, "outputs_agree": agree}
        table_data["model"] = options["model"]
        output.json_file.write_text(json.dumps(table_data, indent=2) + "\n")
    if options["quantizer"] == "lossless" and not agree:
        raise ShadowServeError("the outputs differ although the KV is lossless; please report it with the logs")
    if share < 0.95:
        raise ShadowServeError("the second engine computed stored tokens; its log has the reason (--keep-logs)")


def _stage_table(stages: Any) -> Table:
    title = f"Data plane, both phases: {stages.backend}"
    table = Table("stage", "items", "MB in", "MB out", "GB/s per core", title=title)
    for stage in stages.stages:
        if stage.items:
            moved = (stage.input_bytes, stage.output_bytes)
            rate = f"{max(moved) / stage.busy_ns:.2f}" if stage.busy_ns else ""  # its time is part of another stage's
            table.add_row(stage.stage, f"{stage.items:,d}", *(f"{size / 1e6:.1f}" for size in moved), rate)
    return table

"""Compares times with ShadowServe's storage backend, SGLang's own ``file`` backend and HiCache without storage.

Usage: scripts/test-sglang --compare. Documents of 2,048 tokens with 64 KiB of KV per token are computed and stored.
Then the engine's pools are emptied, and each document is asked again. The first token of an answer is timed. ``file``
reads from the page cache. Systems run one after the other, an engine each; answers must be equal.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in (".", "failures"))]

from machine import wait_for  # noqa: E402
from nodes import DataPlane, Storage  # noqa: E402
from sglang_process import MIB, SGLang  # noqa: E402

TOKENS, DOCUMENTS, ROUNDS = 2048, 3, 3
MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=512, num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=8, head_dim=128,
    intermediate_size=1024, max_position_embeddings=4096, initializer_range=0.05, bos_token_id=1, eos_token_id=2)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""
ARGUMENTS: dict[str, Any] = {
    "dtype": "bfloat16", "max_total_tokens": 9000, "context_length": 4096, "hicache_ratio": 1.5,
}  # fmt: skip


def document(number: int) -> list[int]:
    return [(7 * index + 131 * number + index * index % 13) % 500 + 3 for index in range(TOKENS)]


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        subprocess.run([os.environ["SGLANG_PYTHON"], "-c", MODEL, str(folder / "model")], check=True)
        storage = Storage("memory", folder / "storage", memory_bytes=2048 * MIB).start()
        stages = ("decompression", "dequantization", "dma_source", "store")
        buffers = {f"{each}_buffer_bytes": "64MiB" for each in stages}
        plane = DataPlane(storage.port, folder / "plane", **buffers).start()
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / "file")
        try:
            print(json.dumps(compare(folder, storage, plane), indent=1))
        finally:
            plane.close()
            storage.close()


def compare(folder: Path, storage: Storage, plane: DataPlane) -> dict[str, Any]:
    systems = {"without": (None, {}), "file": (None, {"hicache_storage_backend": "file"}), "ours": (plane.address, {})}
    results: dict[str, Any] = {}
    for name, (address, more) in systems.items():
        log = folder / f"{name}.log"
        engine = SGLang(folder / "model", log, address, **ARGUMENTS, **more)
        try:
            results[name] = measure(engine, name, folder, storage)
        except AssertionError:
            print(log.read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            engine.end()
    answers = {json.dumps(result.pop("tokens")) for result in results.values()}
    assert len(answers) == 1, "answers differ"
    warm = {name: result["warm_s"] for name, result in results.items()}
    fill = {name: result["fill_s"] for name, result in results.items()}
    return results | {
        "ttft_over_file": warm["ours"] / warm["file"],
        "ttft_over_recompute": warm["ours"] / fill["without"],
        "fill_over_without": fill["ours"] / fill["without"],
        "file_fill_over_without": fill["file"] / fill["without"],
    }


def stored(name: str, folder: Path, storage: Storage) -> None:
    """Wait until every document is stored."""
    if name == "file":
        wait_for(lambda: len(list((folder / "file").glob("*.bin"))) >= DOCUMENTS * TOKENS // 16, 300)
    elif name == "ours":
        wait_for(lambda: storage.stored() >= DOCUMENTS * TOKENS // 256, 300)


def measure(engine: SGLang, name: str, folder: Path, storage: Storage) -> dict[str, Any]:
    engine.generate(document(99)[:12], tokens=1)  # the first request compiles; less than a page is not stored
    fills = [engine.generate(document(number) + [5, 6, 7], tokens=1) for number in range(DOCUMENTS)]
    stored(name, folder, storage)
    warm, tokens = [], [fill["tokens"] for fill in fills]
    for _ in range(ROUNDS):
        for number in range(DOCUMENTS):
            engine.flush()
            answer = engine.generate(document(number) + [5, 6, 7], tokens=1)
            assert answer["tokens"] == tokens[number]
            warm.append(answer)
    return {
        "fill_s": statistics.median(fill["seconds"] for fill in fills),
        "warm_s": statistics.median(answer["seconds"] for answer in warm),
        "cached": [answer["cached"].get("storage", 0) for answer in warm],
        "tokens": tokens,
    }


if __name__ == "__main__":
    main()

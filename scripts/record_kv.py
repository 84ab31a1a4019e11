#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record real KV for `shadowserve bench codecs`: tests/assets/kv.bin.

Chunks of 256 tokens of the project's own model, from the middle of two documents that it was not trained on, as
lossless records one after the other. Run again only with another model: figures of different samples do not compare.
"""

import sys

import torch
from measure_quality import ASSETS, CHUNK_TOKENS, KEY, kv_bytes, load_documents, prefill

from shadowserve import native, record
from shadowserve.chunk import ChunkLayout, DType, Quantizer

FIRST_TOKEN = 768
"""First token of the recorded chunk; the tokens before it are context."""
DOCUMENTS = 2


def main() -> int:
    """Prefill, cut out, write."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ASSETS / "model", dtype=torch.float32).eval()
    written = b""
    for document in load_documents(ASSETS / "heldout.jsonl")[:DOCUMENTS]:
        cache = prefill(model, list(document[: FIRST_TOKEN + CHUNK_TOKENS]))
        _, heads, _, head_size = cache[0][0].shape
        layout = ChunkLayout(
            namespace=bytes(32),
            dtype=DType.BFLOAT16,
            layers=len(cache),
            kinds=2,
            vector_length=heads * head_size,
            tokens=CHUNK_TOKENS,
            quantizer=Quantizer.LOSSLESS,
            bins=0,
        )
        kv = kv_bytes(cache, DType.BFLOAT16, FIRST_TOKEN, CHUNK_TOKENS)
        written += record.encode(KEY, native.Codec.DEFLATE, layout, kv)
    (ASSETS / "kv.bin").write_bytes(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())

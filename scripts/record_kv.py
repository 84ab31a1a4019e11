#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record real KV for `shadowserve bench codecs`: tests/assets/kv.bin.

A chunk of 256 tokens of SmolLM2-135M-Instruct, from the middle of a text, in some of its layers: one lossless record.
Needs scripts/setup-demo-model. Run again only with another model: figures of different samples do not compare.
"""

import sys
from pathlib import Path

from rich.console import Console

from shadowserve import native
from shadowserve.chunk import Quantizer
from shadowserve_tools.bench.parts.kv_codecs import records
from shadowserve_tools.bench.parts.real_model import CHUNK_TOKENS, RealModel, texts_to_learn
from shadowserve_tools.demo_model import default_model

ASSETS = Path(__file__).resolve().parents[1] / "tests" / "assets"
FIRST_TOKEN = 768
"""First token of the recorded chunk; the tokens before it are context."""
LAYERS = (1, 10, 20, 29)
"""All thirty would take 4 MB."""


def main() -> int:
    """Prefill, cut out, write."""
    model = RealModel(default_model(Console()))
    text = texts_to_learn()["reference"]
    kv = model.prefill(model.tokens(text[: 16 * (FIRST_TOKEN + CHUNK_TOKENS)])[: FIRST_TOKEN + CHUNK_TOKENS])
    chunk = kv[list(LAYERS), :, FIRST_TOKEN:]
    (ASSETS / "kv.bin").write_bytes(b"".join(records(chunk, native.Codec.DEFLATE, quantizer=Quantizer.LOSSLESS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

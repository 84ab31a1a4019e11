#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Record real KV for `shadowserve bench codecs`: tests/assets/kv.bin.

Chunks of 256 tokens of the project's own model, from the middle of two documents that it was not trained on, as
lossless records one after the other. Run again only with another model: figures of different samples do not compare.
"""

import json
import sys
from pathlib import Path

from shadowserve import native
from shadowserve.chunk import Quantizer
from shadowserve_tools.bench.parts.kv_codecs import records
from shadowserve_tools.bench.parts.real_model import CHUNK_TOKENS, RealModel

ASSETS = Path(__file__).resolve().parents[1] / "tests" / "assets"
FIRST_TOKEN = 768
"""First token of the recorded chunk; the tokens before it are context."""
DOCUMENTS = 2


def main() -> int:
    """Prefill, cut out, write."""
    model, written = RealModel(ASSETS / "model"), b""
    for line in (ASSETS / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:DOCUMENTS]:
        kv = model.prefill(model.tokens(json.loads(line)["text"])[: FIRST_TOKEN + CHUNK_TOKENS])
        written += b"".join(records(kv[:, :, FIRST_TOKEN:], native.Codec.DEFLATE, quantizer=Quantizer.LOSSLESS))
    (ASSETS / "kv.bin").write_bytes(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())

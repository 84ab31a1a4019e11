"""An SGLang engine on a CPU in a process of its own. Commands and answers are lines of JSON.

Runs in the environment of scripts/test-sglang, with the stand-in for SGLang's kernels on PYTHONPATH. The first line has
the engine's arguments; the answer says that it is ready.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # SGLang's processes write to stdout
    import sglang

    started = time.monotonic()
    arguments = {
        "skip_tokenizer_init": True,
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "dtype": "float32",
        "mem_fraction_static": 0.2,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "log_level": "info",
        "sleep_on_idle": True,
        "enable_hierarchical_cache": True,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    engine = sglang.Engine(**arguments | json.loads(sys.stdin.readline()))
    answers.write(json.dumps({"ready_s": time.monotonic() - started}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        answers.write(json.dumps(COMMANDS[command.pop("do")](engine, **command)) + "\n")
    engine.shutdown()


def generate(engine, ids, tokens=8, **more):
    from sglang.srt.managers.io_struct import GenerateReqInput

    began = time.monotonic()
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    request = GenerateReqInput(input_ids=ids, sampling_params=sampling, return_logprob=True, **more)
    answer = engine.loop.run_until_complete(engine.tokenizer_manager.generate_request(request, None).__anext__())
    seconds, meta = time.monotonic() - began, answer["meta_info"]
    return {
        "seconds": seconds,
        "tokens": answer["output_ids"],
        "logprobs": [logprob for logprob, *_ in meta["output_token_logprobs"]],
        "cached": meta.get("cached_tokens_details") or {},
    }


def flush(engine):
    return {"flushed": bool(getattr(engine.flush_cache(), "success", True))}


def update_weights(engine, path):
    return {"updated": engine.update_weights_from_disk(path)[0]}


COMMANDS = {"generate": generate, "flush": flush, "update_weights": update_weights}

if __name__ == "__main__":
    main()

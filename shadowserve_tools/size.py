"""``shadowserve size``: bytes, times and memory for a model, a link and a number of users."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from shadowserve.config_errors import unknown
from shadowserve.errors import ConfigurationError
from shadowserve.keys import DEFAULT_CHUNK_TOKENS
from shadowserve_tools.simulate.objectcache import STORED_SHARE

_TEXT_PARTS: Final = ("text_config", "language_config", "llm_config")
"""Keys of the language model's configuration, in that of a model with images or audio."""
_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_KINDS: Final = {
    **dict.fromkeys(("full_attention", "attention", "indexed_attention", "global_attention"), "full"),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), "window"),
    **dict.fromkeys(("linear_attention", "mamba", "conv", "short_conv"), "state"),
    **dict.fromkeys(("mlp", "moe"), ""),
}
"""The cache of each layer type of transformers; "hybrid" layers have attention and a state."""
_NAMES: Final = {"full": "attention", "state": "recurrent state"}
_BLOCK_TOKENS, _LATENT_BLOCK_TOKENS = 16, 64
_INDEX_SCALE_BYTES: Final = 4
_FP8_STORED_SHARE: Final = 0.8
"""As ``STORED_SHARE``, of fp8: docs/guides/quality.md."""
_SPECIAL: Final = re.compile("sliding|attention_chunk|mamba|linear|conv|ssm|state|compress|hybrid|pattern")
_LINK: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(bps|bit/s|b/s|Bps|B/s)")
_POWERS: Final = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Layers:
    """Layers with the same cache.

    Attributes:
        kind: "full", "window" or "state", as KV cache groups have them.
        token_bytes: KV of one token in all of these layers.
        window: Tokens that a layer sees; 0 for all.
        state_bytes: Recurrent state in all of these layers.
    """

    kind: str
    count: int
    token_bytes: int = 0
    window: int = 0
    state_bytes: int = 0

    def stored_bytes(self, chunk_tokens: int) -> int:
        """Return the KV bytes that the record of one chunk holds: at most the window, or one state."""
        window = -(-(self.window - 1) // _BLOCK_TOKENS) * _BLOCK_TOKENS if self.window else chunk_tokens
        return self.token_bytes * min(chunk_tokens, window) + self.state_bytes

    def loaded_bytes(self, chunk_tokens: int, chunks: int) -> int:
        """Return the KV bytes that a hit of ``chunks`` chunks needs."""
        last = {"full": chunks, "state": 1}.get(self.kind, -(-(self.window - 1) // chunk_tokens))
        return min(chunks, last) * self.stored_bytes(chunk_tokens)

    def held_bytes(self, tokens: int) -> int:
        """Return the bytes that an engine holds for a request."""
        return self.token_bytes * min(tokens, self.window or tokens) + self.state_bytes


class _Model:
    """A model's config.json, with transformers' defaults of its type where transformers is installed."""

    def __init__(self, file: Path) -> None:
        try:
            whole = json.loads((file / "config.json" if file.is_dir() else file).read_text())
            if not isinstance(whole, dict):
                raise ValueError("it is no JSON object")
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--model: cannot read {file}: {error}; give a model's config.json") from error
        part: dict[str, Any] = next((whole[name] for name in _TEXT_PARTS if isinstance(whole.get(name), dict)), whole)
        self.type = str(part.get("model_type") or whole.get("model_type", "unknown"))
        defaults = _defaults(self.type, part)
        self.values = {**defaults, **part}
        types = defaults.get("layer_types") or part.get("layer_types")
        self.layer_types: list[str] = types or self._types(known=bool(defaults))
        self.dtype = next((str(c[k]) for c in (part, whole) for k in ("dtype", "torch_dtype") if c.get(k)), "bfloat16")

    def _types(self, *, known: bool) -> list[str]:
        """Return equal layers; refuses a type that transformers does not know where keys tell of others."""
        hints = [key for key in self.values if self.has(key) and _SPECIAL.search(key)]
        if hints and not known:
            raise ConfigurationError(
                f"--model: the configuration of model type '{self.type}' has {', '.join(hints)}, but no 'layer_types'; "
                "run this where a transformers that knows this type is installed"
            )
        sliding = self.values.get("sliding_window") and self.values.get("use_sliding_window", True)
        return ["sliding_attention" if sliding else "full_attention"] * self.number("num_hidden_layers")

    def has(self, key: str) -> bool:
        return bool(self.values.get(key))

    def number(self, *keys: str, default: int | None = None) -> int:
        """Return the first of these keys that the configuration has."""
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        if default is None:
            raise ConfigurationError(
                f"the configuration of model type '{self.type}' has no number '{keys[0]}'. If it is a default of "
                "transformers, run this where a transformers that knows this type is installed"
            )
        return default

    @property
    def head_size(self) -> int:
        return self.number("head_dim", default=0) or self.number("hidden_size") // self.number("num_attention_heads")

    def layers(self, size: int) -> list[Layers]:
        """Return the layers by their cache, with ``size`` bytes for each element of attention's cache."""
        shared = self.number("num_kv_shared_layers", default=0)
        counts: dict[str, int] = {}
        for name in self.layer_types[: len(self.layer_types) - shared]:
            for each in ("full_attention", "linear_attention") if name == "hybrid" else (name,):
                if each not in _KINDS:
                    known = unknown("layer type", each, [*_KINDS, "hybrid"])
                    raise ConfigurationError(
                        f"--model: {known}. vLLM's log has the sizes of such models ('GPU KV cache size')"
                    )
                counts[_KINDS[each]] = counts.get(_KINDS[each], 0) + 1
        counts.pop("", None)
        if not counts:
            raise ConfigurationError("--model: no layer of this model has a cache")
        found = []
        for kind, count in counts.items():
            if kind == "state":
                found.append(Layers(kind, count, state_bytes=count * self._state_bytes()))
            else:
                window = self.number("sliding_window", "attention_chunk_size") if kind == "window" else 0
                found.append(Layers(kind, count, count * self._token_bytes(kind, size), window))
        return found

    def _token_bytes(self, kind: str, size: int) -> int:
        if self.has("kv_lora_rank"):  # MLA: one latent for all heads; an indexer's keys are bytes with a scale
            indexer = self.number("index_head_dim", default=0)
            latent = size * (self.number("kv_lora_rank") + self.number("qk_rope_head_dim"))
            return latent + (indexer + _INDEX_SCALE_BYTES if indexer else 0)
        heads, head = self.number("num_key_value_heads", "num_attention_heads"), self.head_size
        if kind == "full":  # Gemma 4 has its own there
            heads = self.number("num_global_key_value_heads", default=heads)
            head = self.number("global_head_dim", default=head)
        return 2 * heads * head * size

    def _state_bytes(self) -> int:
        """Return the bytes of one layer's recurrent state: of the convolution, and of what it feeds."""
        number, values = self.number, _DTYPE_BYTES.get(self.dtype, 2)
        ssm = next((str(self.values[k]) for k in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype") if self.has(k)), "")
        ssm_size = _DTYPE_BYTES.get(ssm, values)
        kernel = number("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "conv_L_cache") - 1
        if self.has("linear_num_value_heads"):  # GDN
            keys = number("linear_num_key_heads") * number("linear_key_head_dim")
            inner = number("linear_num_value_heads") * number("linear_value_head_dim")
            width, state = 2 * keys + inner, inner * number("linear_key_head_dim")
        elif self.has("linear_num_heads"):  # KDA, whose state is always in single precision
            inner = number("linear_num_heads") * number("linear_head_dim")
            width, state, ssm_size = 3 * inner, inner * number("linear_head_dim"), 4
        elif self.has("mamba_n_heads") or self.has("mamba_num_heads"):  # Mamba-2
            inner = number("mamba_n_heads", "mamba_num_heads") * number("mamba_d_head", "mamba_head_dim")
            size = number("mamba_d_state", "ssm_state_size")
            width, state = inner + 2 * number("mamba_n_groups", "n_groups") * size, inner * size
        elif self.has("mamba_d_state"):  # Mamba-1
            width = number("mamba_expand") * number("hidden_size")
            state = width * number("mamba_d_state")
        else:  # short convolutions
            width, state = number("conv_dim", "hidden_size"), 0
        return kernel * width * values + state * ssm_size

    def chunk_tokens(self, layers: list[Layers], wanted: int) -> int:
        """Return the tokens of a chunk: whole blocks; with a recurrent state one block, as large as a state."""
        block = _LATENT_BLOCK_TOKENS if self.has("kv_lora_rank") else _BLOCK_TOKENS
        states = [each.state_bytes // each.count for each in layers if each.kind == "state"]
        attention = [each.token_bytes // each.count for each in layers if each.kind != "state"]
        if states and attention:
            return math.ceil(max(states) / max(attention) / block) * block
        return -(-wanted // block) * block

    def prefill_flop(self, tokens: int) -> float:
        """Estimate the operations of a prompt's prefill, from the weights that a token passes and from attention."""
        hidden, heads = self.number("hidden_size"), self.number("num_attention_heads")
        experts = self.number("num_experts_per_tok", "num_experts_per_token", default=0)
        if experts:
            experts += self.number("n_shared_experts", "num_shared_experts", default=0)
            inner = experts * self.number("moe_intermediate_size", "intermediate_size")
            inner += self.number("shared_expert_intermediate_size", "shared_intermediate_size", default=0)
        else:
            inner = self.number("intermediate_size", default=4 * hidden)
        if self.has("kv_lora_rank"):
            query, latent = self.number("q_lora_rank", default=0), self.number("kv_lora_rank")
            head = self.number("qk_nope_head_dim") + self.number("qk_rope_head_dim")
            value = self.number("v_head_dim")
            weights = (hidden + heads * head) * query if query else hidden * heads * head
            weights += hidden * latent + latent * heads * (head + value) + heads * value * hidden
        else:
            head = self.head_size
            weights = 2 * hidden * head * (heads + self.number("num_key_value_heads", "num_attention_heads"))
        count = len(self.layer_types)
        windows = [0 if name == "full_attention" else self.number("sliding_window", default=0)
                   for name in self.layer_types if _KINDS.get(name) in ("full", "window")]  # fmt: skip
        seen = sum(tokens * min(tokens / 2, window or tokens) for window in windows)
        return 2.0 * tokens * count * (weights + 3 * hidden * inner) + 4.0 * heads * head * seen


def _defaults(model_type: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that transformers gives to the keys of a known model type; empty without transformers."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return {}
    if model_type not in CONFIG_MAPPING:
        return {}
    try:
        made = CONFIG_MAPPING[model_type].from_dict(dict(part))
        aliases = {name: getattr(made, name, None) for name in ("layer_types", *made.attribute_map)}
        return {**made.to_dict(), **aliases}
    except Exception as error:  # transformers' checks raise many types
        message = f"--model: transformers refuses this configuration of '{model_type}': {error}"
        raise ConfigurationError(message) from error


class _Link(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A link's rate, in bits per second."""

    name = "RATE"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = _LINK.fullmatch(str(value).strip())
        if not found or not float(found[1]):
            self.fail(f"{value!r} is not a rate; write it like 10Gbps, 800Mbit/s or 1.25GB/s", parameter, context)
        return float(found[1]) * _POWERS[found[2]] * (8 if found[3].startswith("B") else 1)


_POSITIVE: Final = click.FloatRange(min=0, min_open=True)


@click.command(context_settings={"show_default": True})
@click.option("--model", required=True, type=click.Path(path_type=Path), help="A model's config.json, or its folder.")
@click.option("--link", required=True, type=_Link(), help="Rate of the link to the storage node: 10Gbps, 1.25GB/s.")
@click.option("--prompt-tokens", default=8192, type=click.IntRange(1), help="Tokens of a shared prefix.")
@click.option("--users", default=1, type=click.IntRange(1), help="Number of different prefixes of that length.")
@click.option("--chunk-tokens", default=DEFAULT_CHUNK_TOKENS, type=click.IntRange(1), help="As the plugin's key.")
@click.option("--kv-dtype", default="auto", type=click.Choice(["auto", *_DTYPE_BYTES]), help="auto: the model's.")
@click.option(
    "--stored-share", type=_POSITIVE,
    help="Stored bytes over KV bytes.  [default: lossless: 0.66, fp8 0.8; near_lossless has 0.22, small 0.15]",
)  # fmt: skip
@click.option("--prefill-tokens-per-s", type=_POSITIVE, help="Your engine's prefill speed, the better source.")
@click.option("--tflops", default=400.0, type=_POSITIVE, help="Otherwise: the GPU's effective rate (H100: about 400).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def size(as_json: bool, **options: Any) -> None:
    """Compute KV sizes, fetch and prefill times, and memory for a model. Works offline, from its config.json.

    The fetch time is that of the link alone. The prefill time is an estimate from the model's shape (within a third)
    unless --prefill-tokens-per-s gives the measured speed. Times are for one request; GB are 10^9 bytes.
    """
    found = sizes(**options)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = Table("", "", show_header=False, title=f"{found['model_type']}, KV in {found['kv_dtype']}")
    tokens, users = options["prompt_tokens"], options["users"]
    source = "as given" if options["prefill_tokens_per_s"] else f"estimate, {options['tflops']:g} TFLOPS"
    for each in found["layers"]:
        kind = f"window of {each['window']:,d}" if each["window"] else _NAMES[each["kind"]]
        each_bytes = f"{each['token_bytes']:,d} B a token" if each["token_bytes"] else f"{each['state_bytes']:,d} B"
        table.add_row(f"{each['count']} layers", f"{kind}, {each_bytes}")
    for label, text in (
        ("KV of 1,000 tokens", f"{found['kv_bytes_per_1000_tokens'] / 1e9:.4g} GB"),
        ("stored, for 1,000 tokens", f"{found['stored_bytes_per_1000_tokens'] / 1e9:.4g} GB"),
        (f"chunks of {tokens:,d} tokens", f"{found['chunks']:,d} of {found['chunk_tokens']:,d} tokens"),
        ("  fetch of them", f"{found['fetched_bytes'] / 1e9:.4g} GB in {found['fetch_s']:.3g} s"),
        ("  prefill of them", f"{found['prefill_s']:.3g} s ({source})"),
        ("  prefill over fetch", f"{found['prefill_over_fetch']:.3g}"),
        (f"engine memory, {users:,d} users", f"{found['engine_bytes'] / 1e9:.4g} GB"),
        (f"storage, {users:,d} users", f"{found['storage_bytes'] / 1e9:.4g} GB"),
    ):
        table.add_row(label, text)
    Console().print(table)
    if not found["chunks"]:
        click.echo(f"A prefix of {tokens:,d} tokens is shorter than a chunk: nothing of it is stored.")
    elif found["prefill_over_fetch"] < 1:
        click.echo("Computing is faster than this link: set fetch_or_recompute, or use a nearer tier.")


def sizes(
    model: Path,
    link: float,
    prompt_tokens: int,
    users: int,
    chunk_tokens: int,
    kv_dtype: str,
    stored_share: float | None,
    prefill_tokens_per_s: float | None,
    tflops: float,
) -> dict[str, Any]:
    """Return the numbers that the command prints, as its JSON has them. ``link`` is in bits per second."""
    read = _Model(model)
    dtype = read.dtype if kv_dtype == "auto" else kv_dtype
    layers = read.layers(_DTYPE_BYTES.get(dtype, 2))
    chunk = read.chunk_tokens(layers, chunk_tokens)
    chunks = prompt_tokens // chunk
    tokens = chunks * chunk
    share = stored_share or (_FP8_STORED_SHARE if dtype == "fp8" else STORED_SHARE)
    chunk_bytes = share * sum(each.stored_bytes(chunk) for each in layers)
    fetched = share * sum(each.loaded_bytes(chunk, chunks) for each in layers)
    fetch_s = fetched * 8 / link
    prefill_s = tokens / prefill_tokens_per_s if prefill_tokens_per_s else read.prefill_flop(tokens) / tflops / 1e12
    return {
        "model_type": read.type,
        "kv_dtype": dtype,
        "layers": [asdict(each) for each in layers],
        "kv_bytes_per_1000_tokens": 1000 * sum(each.token_bytes for each in layers),
        "stored_bytes_per_1000_tokens": round(1000 * chunk_bytes / chunk),
        "chunk_tokens": chunk,
        "chunks": chunks,
        "fetched_bytes": round(fetched),
        "fetch_s": fetch_s,
        "prefill_s": prefill_s,
        "prefill_over_fetch": prefill_s / fetch_s if fetch_s else 0.0,
        "engine_bytes": users * sum(each.held_bytes(prompt_tokens) for each in layers),
        "storage_bytes": round(users * chunks * chunk_bytes),
    }

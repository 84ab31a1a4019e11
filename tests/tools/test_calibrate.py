# SPDX-License-Identifier: Apache-2.0
"""``shadowserve calibrate``: the file of a tiny model, and the models that are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from shadowserve.calibration import PRESETS, read
from shadowserve.errors import ShadowServeError
from shadowserve_tools import main
from shadowserve_tools.bench.parts.real_model import RealModel
from shadowserve_tools.calibrate import steps

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "model"
LAYERS, HEADS, SIZE = 2, 2, 16
SMALL = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": LAYERS, "head_dim": SIZE,
    "num_attention_heads": 4, "num_key_value_heads": HEADS, "max_position_embeddings": 2048, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that makes the folder of a tiny model with random weights."""

    from transformers import AutoConfig, AutoModelForCausalLM  # three seconds, in the one process that needs it

    def made(model_type: str = "llama", **options: Any) -> Path:
        folder = tmp_path_factory.mktemp(model_type)
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL | options)).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ASSETS / name, folder)
        return folder

    return made


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["calibrate", *map(str, arguments)], prog_name="shadowserve")


@pytest.fixture(scope="module")
def done(make: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Model, file, and what the command prints as JSON."""
    model, file = make(rope_parameters=LLAMA3), tmp_path_factory.mktemp("made") / "tiny.calibration"
    result = run(model, "--output", file, "--json")
    assert result.exit_code == 0, result.output
    return model, file, json.loads(result.output)


def test_the_file_has_the_steps_of_every_preset_and_the_frequencies_of_the_model(done: Any) -> None:
    model, file, printed = done
    found = read(file)
    assert printed["digest"] == found.digest.hex() and printed["file"] == str(file)
    assert (found.model, found.architecture) == (model.name, "LlamaForCausalLM")
    assert json.loads(found.rope)["rope_theta"] > 0
    assert found.centres.shape == (LAYERS, 2, HEADS, SIZE)
    for finer, coarser in zip(PRESETS, PRESETS[1:], strict=False):
        assert (found.steps[finer] <= found.steps[coarser]).all()
        assert found.steps[finer].mean() < found.steps[coarser].mean()
        assert printed["bits"][finer] > printed["bits"][coarser]
    from transformers import AutoModelForCausalLM

    frequencies = AutoModelForCausalLM.from_pretrained(model).base_model.rotary_emb.inv_freq
    np.testing.assert_array_equal(found.frequencies, frequencies.double().numpy())
    assert found.preset("tiny").shard((0, found.layers), (1, 2)).channels(tokens=256).vector_length == SIZE


def test_rounding_to_the_steps_of_a_file_costs_more_with_every_preset(done: Any) -> None:
    model, file, _ = done
    used, found = RealModel(model), read(file)
    with torch.no_grad():
        kv = used.prefill(used.tokens("The cache keeps keys and values of all tokens. " * 4))
        centres, errors = torch.tensor(found.centres).flatten(2), []
        for preset in PRESETS:
            back = steps.rounded(kv, used, centres, torch.tensor(found.steps[preset]).flatten(2))
            assert torch.equal(back[:, :, :4], kv[:, :, :4])
            errors.append(float((back - kv).square().mean()))
    assert 0 < errors[0] < errors[1] < errors[2]


def test_one_channel_with_outliers_makes_no_tokens_exact() -> None:
    samples = torch.randn(1, 2, 500, 8, generator=torch.Generator().manual_seed(1))
    samples[..., 3] *= 1000
    measured = steps.Measured(torch.ones(1, 2, 8), samples)
    for coarse in (0.01, 0.1, 1.0):
        found = steps.symbols(samples, measured.centres, measured.steps(coarse))
        assert (found.abs() <= steps.SYMBOL_MAX).all()
    torch.testing.assert_close(measured.steps(1.0)[..., :3], torch.ones(1, 2, 3))


def test_an_existing_file_is_replaced_only_by_force(done: Any, tmp_path: Path) -> None:
    model, _, printed = done
    file = tmp_path / "kept"
    file.write_text("kept")
    refused = run(model, "-o", file)
    assert refused.exit_code == 1 and "--force to replace it" in refused.output
    assert file.read_text() == "kept"
    again = run(model, "-o", file, "--force")
    assert again.exit_code == 0 and read(file).digest.hex() == printed["digest"]
    assert "near_lossless" in again.output and "bits an element" in again.output


def test_a_folder_for_the_file_that_is_missing_is_reported_before_minutes_are_spent(done: Any, tmp_path: Path) -> None:
    refused = run(done[0], "-o", tmp_path / "none" / "file")
    assert refused.exit_code == 1 and f"{tmp_path / 'none'} is no folder" in refused.output


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    refused = run(tmp_path, "-o", tmp_path / "file")
    assert refused.exit_code == 1 and "is no model that transformers reads" in refused.output
    assert run(tmp_path / "none", "-o", tmp_path / "file").exit_code == 2


def test_help_has_an_example_and_its_duration() -> None:
    text = run("--help").output
    assert "shadowserve calibrate ./SmolLM2-135M-Instruct --output" in text and "minute" in text


MLA = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "first_k_dense_replace": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type dynamic"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "long_factor": [1.0] * 8,
             "short_factor": [1.0] * 8, "original_max_position_embeddings": 512}},
            "type longrope",
        ),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}}, "mrope"),
        ("llama", {"max_position_embeddings": 512}, "has 512 positions; calibration needs 1152"),
        ("mistral", {"sliding_window": 1500}, "without full attention"),
        ("gemma3_text", {"sliding_window": 512}, "in several ways"),
        ("glm", {"partial_rotary_factor": 0.5}, "halves of a head"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "halves of a head"),
        ("deepseek_v3", MLA, "latent attention"),
    ],
)  # fmt: skip
def test_a_model_whose_keys_cannot_be_unrotated_is_refused_with_the_reason(
    make: Make, tmp_path: Path, model_type: str, options: dict[str, Any], reason: str
) -> None:
    model = make(model_type, **options)
    refused = run(model, "--output", tmp_path / "file")
    assert refused.exit_code == 1 and reason in refused.output, refused.output
    assert len(refused.output.splitlines()) == 1 and not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("model_type", "options", "pairs"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, SIZE // 2),
        ("qwen3", {}, SIZE // 2),
        ("phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}, SIZE // 4),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048}, 0),
    ],
)
def test_keys_of_these_models_come_back_from_their_plain_form(
    make: Make, model_type: str, options: dict[str, Any], pairs: int
) -> None:
    model = RealModel(make(model_type, **options))
    model.check_plain()
    assert len(model.frequencies) == pairs
    with torch.no_grad():
        kv = model.prefill(model.tokens("Keys and values."))
        torch.testing.assert_close(model.rotated(model.plain(kv)), kv, atol=1e-4, rtol=1e-4)


def test_a_key_that_is_not_rotated_as_its_frequencies_say_is_found(make: Make) -> None:
    model = RealModel(make())
    model.frequencies = 2 * model.frequencies
    with pytest.raises(ShadowServeError, match="does not rotate all keys in halves of a head"):
        model.check_plain()

"""Steps of an engine's model, without an engine."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from host_control.config import HostConfig
from host_control.vllm.calibrated import STEPS_BYTES_MAX, preset_steps
from shadowserve.calibration import KINDS, PRESETS, Calibration
from shadowserve.errors import ConfigurationError

ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


def engine(layers: int, heads: int, size: int, **rope: Any) -> Any:
    text = SimpleNamespace(num_hidden_layers=layers, architectures=None, rope_parameters=ROPE | {"more": 1} | rope)
    model = SimpleNamespace(
        hf_text_config=text, hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        get_total_num_kv_heads=lambda: heads, get_head_size=lambda: size,
    )  # fmt: skip
    return SimpleNamespace(model_config=model)


def config_of(file: Path, layers: int, heads: int, size: int) -> HostConfig:
    shape = (layers, KINDS, heads, size)
    steps, centres = dict.fromkeys(PRESETS, np.ones(shape, np.float32)), np.zeros(shape, np.float32)
    Calibration("a model", "LlamaForCausalLM", json.dumps(ROPE), steps, centres, np.ones(size // 2)).write(file)
    return HostConfig(quantizer="small", calibration=str(file))


def test_a_calibration_fits_a_model_whose_rope_parameters_have_more_keys(tmp_path: Path) -> None:
    config = config_of(tmp_path / "c", 3, 2, 16)
    found = preset_steps(config, engine(3, 2, 16))
    assert found.name.startswith(found.label) and len(found.label) == len("small of ") + 16
    assert preset_steps(HostConfig(), engine(3, 2, 16)) is None
    for other in (engine(4, 2, 16), engine(3, 1, 16), engine(3, 2, 8), engine(3, 2, 16, rope_theta=5e5)):
        with pytest.raises(ConfigurationError, match="made of a model, which has .* instead of"):
            preset_steps(config, other)


def test_steps_that_no_message_holds_are_refused(tmp_path: Path) -> None:
    layers = STEPS_BYTES_MAX // (2 * 4 * KINDS * 64 * 128) + 1
    config = config_of(tmp_path / "c", layers, 64, 128)
    with pytest.raises(ConfigurationError, match="this model is too large for quantizer: small"):
        preset_steps(config, engine(layers, 64, 128))

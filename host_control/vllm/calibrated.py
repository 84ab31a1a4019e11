"""Steps of the quantizer ``weighted`` for an engine's model, from the calibration that the configuration names."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from host_control.config import HostConfig
from shadowserve.calibration import PRESETS, Calibration, Steps, read
from shadowserve.errors import ConfigurationError

STEPS_BYTES_MAX: Final = 7 << 20
"""Most bytes of steps and centres: a message to the data plane has at most 8 MiB."""
_DIGEST_CHARACTERS: Final = 16
_DIGEST_LENGTH: Final = 64


@dataclass(frozen=True, eq=False)
class PresetSteps:
    """Steps of a preset.

    Attributes:
        name: The preset, and its calibration's digest: engines share KV only with the same name.
    """

    steps: Steps
    name: str

    @property
    def label(self) -> str:
        """Name with the first digits of the digest, for messages."""
        return self.name[: _DIGEST_CHARACTERS - _DIGEST_LENGTH]


def preset_steps(config: HostConfig, vllm_config: Any) -> PresetSteps | None:
    """Return the steps for an engine's model; None if the configured quantizer needs none.

    Raises:
        ConfigurationError: The file cannot be read, belongs to another model, or is too large.
    """
    if config.quantizer not in PRESETS:
        return None
    calibration = read(Path(config.calibration))
    _check_model(config.calibration, calibration, vllm_config.model_config)
    steps = calibration.preset(config.quantizer)
    if (size := steps.steps.nbytes + steps.centres.nbytes) > STEPS_BYTES_MAX:
        raise ConfigurationError(
            f"the calibration {config.calibration} has {size:,d} bytes of steps, and a message to the data plane takes "
            f"{STEPS_BYTES_MAX:,d}: this model is too large for quantizer: {config.quantizer}"
        )
    return PresetSteps(steps, f"{config.quantizer} of {calibration.digest.hex()}")


def _check_model(file: str, calibration: Calibration, model: Any) -> None:
    """Raise ConfigurationError unless a calibration fits a model of vLLM."""
    text = model.hf_text_config
    architectures = [*(getattr(model.hf_config, "architectures", None) or ()), *(text.architectures or ())]
    found = {
        "layers": (calibration.layers, int(text.num_hidden_layers)),
        "KV heads": (calibration.heads, int(model.get_total_num_kv_heads())),
        "elements in a head": (calibration.head_size, int(model.get_head_size())),
    }
    differences = [f"{theirs} {name} instead of {ours}" for name, (theirs, ours) in found.items() if theirs != ours]
    if calibration.architecture not in architectures:
        differences.append(f"the architecture {calibration.architecture} instead of {', '.join(architectures)}")
    # vLLM adds defaults to the parameters of a checkpoint.
    rope, actual = json.loads(calibration.rope or "{}"), getattr(text, "rope_parameters", None) or {}
    differences += [
        f"{key} {value!r} of the rotary embedding instead of {actual.get(key)!r}"
        for key, value in rope.items()
        if actual.get(key) != value
    ]
    if differences:
        raise ConfigurationError(
            f"the calibration {file} was made of {calibration.model}, which has {'; '.join(differences)}: run "
            "'shadowserve calibrate' with this engine's model"
        )

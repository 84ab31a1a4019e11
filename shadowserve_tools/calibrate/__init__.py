"""``shadowserve calibrate``: steps of the ``weighted`` quantizer for one model, as a file."""

import json
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from shadowserve.errors import ShadowServeError


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--output", "-o", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), required=True,
    help="File for the calibration, in the safetensors format.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def calibrate(model: Path, output: Path, force: bool, as_json: bool) -> None:
    """Learn the steps of the quantizers near_lossless, small and tiny for MODEL, a folder in Hugging Face's format.

    A step says how coarsely a channel of keys or values may be rounded, from what it changes in the model's
    predictions. The texts come with Python. The file has steps for all presets: near_lossless, small and tiny.
    'shadowserve bench quality' measures what they lose and save.

    \b
    A calibration of 135 million parameters takes one minute on two cores; time and memory grow with the model:
        shadowserve calibrate ./SmolLM2-135M-Instruct --output smollm2.calibration

    \b
    Then configure the engines:
        quantizer: near_lossless
        calibration: smollm2.calibration

    The model needs full attention in all layers, keys and values of one shape, and rotary positions in halves of a
    head that do not depend on the prompt, or none. Others are refused: MLA, sliding windows, recurrent state,
    dynamic, longrope and multimodal rotary positions. The model runs in float32, which needs 4 bytes a parameter.
    """
    if output.exists() and not force:
        raise ShadowServeError(f"{output} exists: give another --output, or --force to replace it")
    if not output.absolute().parent.is_dir():
        raise ShadowServeError(f"{output.absolute().parent} is no folder: create it, or give another --output")
    from shadowserve_tools.bench.parts.real_model import RealModel
    from shadowserve_tools.calibrate.steps import artefact, learn

    begin = time.monotonic()
    used = RealModel(model)
    found, coarse = learn(used)
    made = artefact(used, found, coarse)
    made.write(output)
    about = {
        "file": str(output), "digest": made.digest.hex(), "model": made.model, "architecture": made.architecture,
        "layers": made.layers, "heads": made.heads, "head_size": made.head_size,
        "rotary_pairs": len(made.frequencies), "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip
    bits = {preset: round(found.bits(each), 2) for preset, each in coarse.items()}
    if as_json:
        click.echo(json.dumps({**about, "bits": bits}, indent=2))
        return
    table = Table("", "", show_header=False, title="the calibration")
    for name, value in about.items():
        table.add_row(name.replace("_", " "), str(value))
    for preset, value in bits.items():
        table.add_row(preset, f"about {value} bits an element")
    Console().print(table)

"""Conversion between messages and the programs' types."""

from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from shadowserve.calibration import KINDS, Steps
from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import DEFAULT_CHUNK_TOKENS, ModelIdentity
from shadowserve.proto import dataplane_pb2 as pb

_ENUMS = {"dtype": DType, "quantizer": Quantizer}


def layout_message(layout: ChunkLayout) -> pb.ChunkLayout:
    """Return the message of a layout; its fields have the same names."""
    return pb.ChunkLayout(namespace=layout.namespace, **layout.described())


def layout_from_message(message: pb.ChunkLayout) -> ChunkLayout:
    """Return the layout of an untrusted message.

    Raises:
        ValueError: No record can hold such a chunk; the message names the field.
    """
    values = {field.name: getattr(message, field.name) for field in fields(ChunkLayout)}
    return ChunkLayout(**values | {name: enum.from_label(values[name]) for name, enum in _ENUMS.items()})


def steps_message(steps: Steps) -> pb.Steps:
    """Return the message of a model's steps."""
    layers, _, heads, head_size = steps.steps.shape
    numbers = {"steps": steps.steps.astype("<f4").tobytes(), "centres": steps.centres.astype("<f4").tobytes()}
    return pb.Steps(layers=layers, heads=heads, head_size=head_size, frequencies=steps.frequencies, **numbers)


def steps_from_message(message: pb.Steps) -> Steps:
    """Return the steps of an untrusted message; the numbers are not checked.

    Raises:
        ValueError: An array has another size than the model; the message names the field.
    """
    shape = (message.layers, KINDS, message.heads, message.head_size)

    def array(name: str) -> npt.NDArray[np.float32]:
        data, size = getattr(message, name), 4 * message.layers * KINDS * message.heads * message.head_size
        if len(data) != size or not size:
            raise ValueError(f"steps.{name} has {len(data)} bytes; a model of {shape} channels has {size}")
        return np.frombuffer(data, "<f4").reshape(shape)

    return Steps(array("steps"), array("centres"), np.array(message.frequencies, np.float64))


def engine_message(model: ModelIdentity, layout: ChunkLayout, *, paged: bool, steps: str = "") -> pb.Engine:
    """Return the message of an engine: the properties that engines must have in common to share KV.

    Args:
        model: Identity of the engine's model.
        layout: Layout of its chunks in one group.
        paged: True if chunks are stored in the layout of the engine's pages.
        steps: Preset of ``weighted`` and digest of its calibration.
    """
    quantizer = layout.quantizer.label
    if layout.quantizer is Quantizer.WEIGHTED:
        quantizer = steps
    if layout.quantizer is Quantizer.BINNED:
        values = layout.value_bins or layout.bins
        quantizer += f" of {layout.bins} and {values} bins, {layout.scale_tokens} tokens a scale"
    return pb.Engine(
        model=replace(model, chunk_tokens=DEFAULT_CHUNK_TOKENS).digest(),
        chunk_tokens=model.chunk_tokens,
        quantizer=quantizer + (", as pages" if paged else ""),
    )

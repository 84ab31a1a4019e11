"""Conversion between messages and the programs' types."""

from dataclasses import fields, replace

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


def engine_message(model: ModelIdentity, layout: ChunkLayout, *, paged: bool) -> pb.Engine:
    """Return the message of an engine: the properties that engines must have in common to share KV.

    Args:
        model: Identity of the engine's model.
        layout: Layout of its chunks in one group.
        paged: True if chunks are stored in the layout of the engine's pages.
    """
    quantizer = layout.quantizer.label
    if layout.quantizer is Quantizer.BINNED:
        values = layout.value_bins or layout.bins
        quantizer += f" of {layout.bins} and {values} bins, {layout.scale_tokens} tokens a scale"
    return pb.Engine(
        model=replace(model, chunk_tokens=DEFAULT_CHUNK_TOKENS).digest(),
        chunk_tokens=model.chunk_tokens,
        quantizer=quantizer + (", as pages" if paged else ""),
    )

"""Between messages and what the programs work with."""

from dataclasses import fields, replace

from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.keys import DEFAULT_CHUNK_TOKENS, ModelIdentity
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["engine_message", "layout_from_message", "layout_message"]

_ENUMS = {"dtype": DType, "quantizer": Quantizer}


def layout_message(layout: ChunkLayout) -> pb.ChunkLayout:
    """Return the message for a description; its fields are the description's, by name."""
    return pb.ChunkLayout(namespace=layout.namespace, **layout.described())


def layout_from_message(message: pb.ChunkLayout) -> ChunkLayout:
    """Return the description in a message that anybody may have sent.

    Raises:
        ValueError: it describes no chunk that can be stored; the message names the field.
    """
    values = {field.name: getattr(message, field.name) for field in fields(ChunkLayout)}
    return ChunkLayout(**values | {name: enum.from_label(values[name]) for name, enum in _ENUMS.items()})


def engine_message(model: ModelIdentity, layout: ChunkLayout, *, paged: bool) -> pb.Engine:
    """Return what decides which other engines share what an engine stores.

    Args:
        model: of the engine.
        layout: of its chunks, in one group.
        paged: whether they are stored as its pages are.
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

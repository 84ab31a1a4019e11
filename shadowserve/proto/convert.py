"""Between messages and what the programs work with."""

from dataclasses import fields

from shadowserve.chunk import ChunkLayout, DType, Quantizer
from shadowserve.proto import dataplane_pb2 as pb

__all__ = ["layout_from_message", "layout_message"]

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

"""The pool engine: memory and SSDs as one store. Each device is a volume of its own (docs/storage-format.md)."""

__all__: list[str] = []

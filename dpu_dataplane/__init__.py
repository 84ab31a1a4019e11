"""The data plane: the daemon that fetches, verifies, decodes and delivers KV chunks, and stores them.

Start it with ``shadowserve dpu``; from Python with :func:`dpu_dataplane.server.run`.
``README.md`` beside this file tells how it is put together.
"""

__all__: list[str] = []

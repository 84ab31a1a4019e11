"""What lives in the serving process: the KV cache manager and the engine adapters.

Engine-neutral: configuration (:mod:`host_control.config`), the connection to a data plane
(:mod:`host_control.connection`) and its client (:mod:`host_control.client`), shared memory
(:mod:`host_control.segment`), lookups (:mod:`host_control.lookup`), the KV cache manager
(:mod:`host_control.manager`), background storing (:mod:`host_control.store`), paged KV layouts
(:mod:`host_control.layouts`). Adapters: :mod:`host_control.vllm`.
"""

__all__: list[str] = []

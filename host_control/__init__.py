"""What lives in the serving process: the KV cache manager and the engine adapters.

Engine-neutral: configuration (:mod:`host_control.config`), the connection to a data plane
(:mod:`host_control.connection`) and its client (:mod:`host_control.client`), memory that it delivers into
(:mod:`host_control.destination`) and the kinds of it (:mod:`host_control.delivery`, :mod:`host_control.segment`,
:mod:`host_control.cuda`), lookups (:mod:`host_control.lookup`), the KV cache manager
(:mod:`host_control.manager`), background storing (:mod:`host_control.store`), paged KV layouts
(:mod:`host_control.layouts`). Adapters: :mod:`host_control.vllm`.
"""

__all__: list[str] = []

"""ShadowServe in SGLang: a storage backend of HiCache (docs/guides/sglang.md).

``--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "shadowserve",
"module_path": "host_control.sglang", "class_name": "ShadowServeStorage", "interface_v1": 1,
"hicache_storage_pass_prefix_keys": true, "data_plane": "127.0.0.1:50151"}'``
"""

from host_control.sglang.storage import ShadowServeStorage

__all__ = ["ShadowServeStorage"]

"""ShadowServe in vLLM: an out-of-tree KV connector.

``vllm serve MODEL --kv-transfer-config '{"kv_connector": "ShadowServeConnector", "kv_role": "kv_both",
"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"data_plane": "127.0.0.1:50151"}}'``

vLLM finds :func:`register` through the entry point group ``vllm.general_plugins``. Where the package is importable but
not installed, add ``"kv_connector_module_path": "host_control.vllm.connector"``.
"""

__all__ = ["register"]


def register() -> None:
    """Make ``ShadowServeConnector`` known to vLLM, and have its configuration checked before weights are loaded.

    vLLM calls it in each of its processes, any number of times.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from host_control.vllm.start_check import check_at_start

    check_at_start()
    try:
        KVConnectorFactory.register_connector(
            "ShadowServeConnector", "host_control.vllm.connector", "ShadowServeConnector"
        )
    except ValueError:
        # Registered before. Whether by us or another makes no difference to vLLM: it would have refused both.
        return

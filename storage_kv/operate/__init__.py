"""Operation of the storage node: metrics, health, and the configuration of a running one."""

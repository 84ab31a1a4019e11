"""What those who run the storage node see and change: metrics, health, and the configuration of a running one."""

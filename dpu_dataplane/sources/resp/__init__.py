"""Servers that speak RESP as a source: one server, several storage nodes, or the nodes of a cluster."""

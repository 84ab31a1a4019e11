"""The clients of the storage node: their sockets, the threads that serve them, and TLS."""

"""The storage node: a server that speaks RESP. README.md has the order in which to read it."""

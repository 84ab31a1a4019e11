"""The storage node: a server that speaks RESP, the table of its commands, and the stores that hold the values.

It knows records only as bytes with a head, and nothing of hosts, data planes or models. See ``README.md`` beside
this file for the order in which to read it.
"""

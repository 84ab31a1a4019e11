"""Parts for LMCache servers: a lossless serde (``serde``) and a load policy (``load_policy``).

docs/guides/from-lmcache.md has the flags. ``objects`` and ``choice`` need neither LMCache nor PyTorch.
"""

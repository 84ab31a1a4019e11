"""The data plane: a daemon that moves KV between engines' memory and storage. See README.md in this folder."""

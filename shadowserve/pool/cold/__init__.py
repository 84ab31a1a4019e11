"""The pool's lower tier: records in an S3 bucket, which several nodes may share (docs/guides/object-storage.md)."""

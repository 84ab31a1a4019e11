"""The pool's lower tier: records in an S3 bucket, which several nodes may share (docs/object-storage.md)."""

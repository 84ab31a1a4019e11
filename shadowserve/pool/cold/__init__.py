"""The pool's coldest tier: records in an S3 bucket, which several nodes may share (docs/object-storage.md)."""

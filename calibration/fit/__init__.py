"""The learned parts, one file each, and the pipeline that fits them from a capture."""

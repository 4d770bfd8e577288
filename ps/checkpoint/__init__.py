"""A save as files: where it lies, its manifest, its rows."""

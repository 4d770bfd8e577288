"""The daemon `python -m workers.node`."""

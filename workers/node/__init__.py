"""The daemon `python -m workers.node`: holds a lease, starts processes, watches them."""

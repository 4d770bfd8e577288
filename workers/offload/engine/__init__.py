"""The C++ engine as Python sees it: `from workers.offload.engine import _reads`."""

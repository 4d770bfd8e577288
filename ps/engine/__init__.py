"""The C++ engine as Python sees it: `from ps.engine import _native`."""

"""The process `python -m ps.server`."""

"""Models larger than memory: `python -m bench.beyond`."""

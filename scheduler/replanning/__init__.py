"""Whether the rest of a run is worth moving."""

"""Whether the rest of a run is worth moving to another plan, by what was measured."""

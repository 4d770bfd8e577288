"""How fast a CTR network trains on this machine, beside others in the same run."""

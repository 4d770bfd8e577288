"""This host's devices: which unit is whose, and copies to and from it."""

"""Experts beyond memory: the file that they lie in, and layers that read them from it."""

"""Compute plane: node daemon, stage executor, layers, profiler."""

"""Profiling without a cluster."""

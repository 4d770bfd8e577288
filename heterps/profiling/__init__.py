"""Profiling a model without a cluster."""

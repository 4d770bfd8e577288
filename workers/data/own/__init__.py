"""Samples of a job's own code, and where its iterables can go on."""

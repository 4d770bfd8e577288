"""Columns of a job's data, each checked and made into arrays."""

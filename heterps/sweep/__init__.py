"""Sweeps: many trainings of one job, to find the values of its keys that are best."""

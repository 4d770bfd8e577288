"""Clusters that we start."""

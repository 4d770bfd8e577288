"""Clusters that we start: one of a command, one that stays, one on Ray."""

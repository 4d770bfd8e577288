"""Traces of routed experts, their replay, and the mode that they speak for."""

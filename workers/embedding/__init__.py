"""Embedding layers whose rows lie on the parameter servers."""

"""Embeddings on the parameter servers."""

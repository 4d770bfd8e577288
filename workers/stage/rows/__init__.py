"""Rows of embeddings: pulled ahead of need, and their gradients committed."""

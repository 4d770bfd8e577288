"""Layers of a user's model that HeterPS knows how to place, shard and feed."""

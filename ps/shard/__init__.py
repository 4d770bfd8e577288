"""The state of one shard and what keeps it."""

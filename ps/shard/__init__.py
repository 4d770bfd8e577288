"""The state of one shard and what keeps it: log, replica, saves, buckets that move."""

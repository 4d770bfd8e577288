"""Tables and shards without a cluster."""

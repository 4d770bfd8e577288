"""Tables in this process, and shards started on this machine, without a cluster."""

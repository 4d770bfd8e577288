"""Client and shard of one host: shared blocks and the Unix socket."""

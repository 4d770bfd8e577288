"""What a table is: spec, rules, keys and buckets, the gate."""

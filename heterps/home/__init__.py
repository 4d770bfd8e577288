"""What a user keeps: contexts, running cluster, certificates."""

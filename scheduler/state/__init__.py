"""What is known, kept in Redis."""

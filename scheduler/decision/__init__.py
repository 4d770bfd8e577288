"""The answer as a record."""

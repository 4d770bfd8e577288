"""The answer as a record: as JSON, as a message, and what it came from."""

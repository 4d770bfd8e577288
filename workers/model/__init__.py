"""A job's code to a chain of layers, and saved again."""

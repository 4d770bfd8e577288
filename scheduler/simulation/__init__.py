"""A training on machines that nobody has here: simulated from constants that were measured."""

"""A model that runs with its experts out of memory."""

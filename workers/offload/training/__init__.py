"""A model that is trained with its experts out of memory."""

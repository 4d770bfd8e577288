"""A question put to the methods, the answer put in words."""

"""The file of experts: how they lie in it, what it is made of, and what is trained in it."""

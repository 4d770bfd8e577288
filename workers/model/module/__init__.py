"""A job's module as it is: its inputs, state, random numbers and running statistics."""

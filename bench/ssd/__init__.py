"""Tables beyond memory beside key-value stores, see `__main__`."""

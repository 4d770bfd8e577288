"""An ordinary module as a chain of layers that can be cut into stages."""

"""Planning, measured."""

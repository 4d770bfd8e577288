"""The drawing kit of page and console."""

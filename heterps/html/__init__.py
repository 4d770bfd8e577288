"""The drawing kit that page and console share."""

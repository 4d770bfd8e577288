"""Whether a plan runs at the pace that its decision promised."""

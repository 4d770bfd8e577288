"""Losses, optimizers, precision, quality."""

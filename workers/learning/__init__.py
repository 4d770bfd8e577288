"""Losses, optimizers, precision, and how good a model is."""

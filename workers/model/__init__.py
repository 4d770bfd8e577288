"""From a job's code to a chain of layers, and to a saved model."""

"""The process `python -m workers.stage`: the training step."""

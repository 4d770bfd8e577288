"""What of a model would train wrongly, found before anything is trained."""

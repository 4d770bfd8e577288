"""What a layer costs on each type: measured here, or estimated from a data sheet."""

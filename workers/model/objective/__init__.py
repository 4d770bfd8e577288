"""What a job minimises and measures: losses, metrics and their course."""

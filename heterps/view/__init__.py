"""What decisions, changes, figures and failures show, in words, for terminal, page and console."""

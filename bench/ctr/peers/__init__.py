"""The peers, each a program of its own."""

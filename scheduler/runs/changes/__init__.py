"""What changes an attempt while it trains: workers replaced, nodes left, other plans."""

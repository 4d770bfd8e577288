"""What a step calls, by connections of our own: the calls, and the stream between hosts."""

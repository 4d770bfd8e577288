"""What a worker tells of itself: how far it is, how busy, why it failed."""

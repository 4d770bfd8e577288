"""Weights for others: feed, publisher, follower, exports."""

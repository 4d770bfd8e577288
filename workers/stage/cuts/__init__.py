"""What training has made, kept so that it may begin there."""

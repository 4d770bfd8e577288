"""The parameter server beside others."""

"""Experts in memory: slots that are filled anew, sections that go round, and who reads them."""

"""Experts of a stage: split over its workers, or out of memory."""

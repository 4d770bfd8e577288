"""Figures and plans in words, shared by terminal, page and console."""

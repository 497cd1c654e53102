"""Runs it with NumPy."""

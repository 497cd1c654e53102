"""The NumPy back end."""

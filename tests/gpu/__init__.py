"""The CuPy back end; most of it needs a GPU."""

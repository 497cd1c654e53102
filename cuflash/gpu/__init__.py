"""Runs it on a GPU: compilation, arguments, launches."""

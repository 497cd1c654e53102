"""Runs the kernels' own sources on the CPU, without a GPU: test equipment, not a back end."""

"""Kernels run by their own sources on the CPU, every access to memory checked: test equipment, not a back end."""

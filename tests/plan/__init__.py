"""Which kernel, tile and grid a call gets, and what has a say in it; no device."""

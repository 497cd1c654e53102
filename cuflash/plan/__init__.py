"""How it is computed: kernel, tile, splits. Pure Python; needs no GPU."""

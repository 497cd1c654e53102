"""`python -m cuflash bench`: the speed and error of every kernel. Nothing here takes part in a call."""

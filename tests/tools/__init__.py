"""What lies around the function: commands, demo, benchmark, notebooks, and what is shipped."""

"""What every row of the kernel table owes, on whatever it runs."""

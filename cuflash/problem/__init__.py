"""What is asked: arrays and options, checked. Knows no device and no kernel."""

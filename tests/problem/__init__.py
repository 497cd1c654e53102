"""What a call means, and what it must not be; no device."""

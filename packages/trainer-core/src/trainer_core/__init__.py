"""A training loop that is small to read, exact in its numbers and resumable anywhere."""

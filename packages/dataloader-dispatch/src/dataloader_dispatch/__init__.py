"""Every document exactly once an epoch, resumable in constant time, for any training loop."""

"""Tokens per second, model FLOPs and utilization for any training loop."""

"""Atomic, verified checkpoints in the Hugging Face layout for any training loop."""

"""Peak FLOP/s and memory bandwidth of accelerators, looked up by exact device name."""

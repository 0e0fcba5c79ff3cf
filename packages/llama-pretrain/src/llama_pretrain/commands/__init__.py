"""The commands beside `train`: their settings in `arguments`, which imports no torch, and their work."""

"""Bytes on the disk: safetensors files that several ranks write and read, with checksums."""

"""Data in object stores: a process that fetches, a cache on the disk, and files that are read through it."""

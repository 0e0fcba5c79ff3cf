"""Where documents come from: files, columns of tables, and token ids on the disk."""

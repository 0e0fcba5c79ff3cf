"""Log files: writing, reading, drawing."""

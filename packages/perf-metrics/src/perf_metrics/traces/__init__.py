"""Where the time of a training step goes, from the profiler traces of one or all ranks."""

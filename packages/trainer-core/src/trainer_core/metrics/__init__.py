"""What a run measures: log entries, speed, FLOPs, bytes sent, memory."""

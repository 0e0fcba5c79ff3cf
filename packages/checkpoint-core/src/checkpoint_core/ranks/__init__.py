"""What ranks decide together: agreement, who writes what, replicas, and parts of one state."""

"""How a run is laid out over ranks."""

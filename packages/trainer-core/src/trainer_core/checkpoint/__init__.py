"""What of a run is saved, where, and how it is resumed."""

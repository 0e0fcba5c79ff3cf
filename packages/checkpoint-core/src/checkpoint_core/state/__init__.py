"""The state of objects: taken out of them by name, encoded without pickle, and put back."""

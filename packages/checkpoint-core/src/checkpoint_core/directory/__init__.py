"""The directories of checkpoints: manifest, commit, discovery, verification and rotation."""

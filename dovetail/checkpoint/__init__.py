"""What is on disk: folders that are either complete or absent, sharded state inside them, and random-number state."""

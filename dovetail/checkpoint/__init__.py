"""What is on disk: folders that are either whole or absent, sharded state inside them, and random-number state."""

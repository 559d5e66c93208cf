"""What is on disk: sharded state with a manifest written last."""

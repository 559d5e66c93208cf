"""What is seen: reads the run folder only."""

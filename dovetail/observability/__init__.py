"""What is recorded: metrics, timings, events. Imports neither torch nor ray."""

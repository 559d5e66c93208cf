"""Rules that score an answer by looking at it. One file each, no torch, no network but for the remote sandbox."""

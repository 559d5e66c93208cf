"""Does this machine, or this cluster, work? Real runs of each path with numbers to judge them by. Keeps no weights."""

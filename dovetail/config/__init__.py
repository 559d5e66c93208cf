"""What can be set: typed sections, their checks and the plan. Imports neither torch nor ray."""

"""Policy losses, and the value loss. Importing `dovetail.algorithms` registers the policy losses."""

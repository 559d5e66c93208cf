"""Policy losses, one file each, and the value loss. Importing this package registers the policy losses."""

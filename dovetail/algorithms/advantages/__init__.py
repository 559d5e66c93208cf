"""Advantage estimators, one file each. Importing this package registers them all."""

"""Advantage estimators. Importing `dovetail.algorithms` registers them all."""

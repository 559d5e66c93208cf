"""Servers as engines: a pool of them, an HTTP client, a dialect for each kind, and an engine made of these."""

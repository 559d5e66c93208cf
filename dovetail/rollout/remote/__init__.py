"""Engines on other machines, reached by URL: a router over servers, an HTTP client, and an engine made of both."""

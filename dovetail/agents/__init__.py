"""Conversations of several turns, with tools and environments: next to the engine, without Ray."""

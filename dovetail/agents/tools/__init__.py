"""Tools that a model can call: users' functions and classes, verl's files, MCP servers, and those that come with it."""

"""What travels between processes: `DataProto` and the schema of its columns. Knows nothing of models."""

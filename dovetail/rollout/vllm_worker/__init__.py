"""What runs inside vLLM's workers, in an engine of this program and in a server alike. Imports no engine."""

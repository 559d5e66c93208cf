"""How a model is trained. Knows no reinforcement learning."""

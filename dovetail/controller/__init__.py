"""How one process drives N: groups, dispatch and placement. Knows no reinforcement learning."""

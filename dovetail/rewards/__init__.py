"""How an answer is scored."""

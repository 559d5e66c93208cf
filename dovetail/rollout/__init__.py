"""How text is generated: token ids in, token ids and log-probs out."""

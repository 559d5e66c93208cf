"""What Megatron must know of each family of models: its configuration, and its weights under Hugging Face names."""

"""The embedded engine: Hugging Face modules, our own KV cache, scheduler and sampler, no extra install."""

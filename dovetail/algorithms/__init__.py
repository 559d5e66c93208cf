"""The maths: tensors in, tensors out. No Ray, no transformers, no config objects."""

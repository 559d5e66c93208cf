"""The built-in families; importing this module registers them."""

"""How weights reach an engine: sources stream full tensors, sinks take them."""

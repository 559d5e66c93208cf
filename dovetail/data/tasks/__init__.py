"""Tasks that are generated, not downloaded, in levels of difficulty."""

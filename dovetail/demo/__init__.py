"""Small models and generated tasks, for the demo, the doctor and tests: nothing to download."""

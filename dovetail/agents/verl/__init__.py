"""Files written for verl, run as they are: its base classes, under its own import names, and adapters to ours."""

"""What happens in a step: the driver's loop over groups."""

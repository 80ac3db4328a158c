"""The clocks of a step."""

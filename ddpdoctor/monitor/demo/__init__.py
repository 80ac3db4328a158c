"""An invented run for the screen."""

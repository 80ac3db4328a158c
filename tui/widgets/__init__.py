"""What Textual draws: one canvas for the whole screen."""

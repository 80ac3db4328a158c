"""Every printed remedy, applied to the letter: nothing of its check is found any more, and nothing else instead."""

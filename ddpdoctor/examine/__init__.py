"""``check``: a script is read, its ranks are rehearsed, and both are put together to an examination."""

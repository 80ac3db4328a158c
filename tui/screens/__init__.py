"""The pages of the screen: each draws one kind of view, as a pure function of it and of the room there is."""

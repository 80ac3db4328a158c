"""The run that never was of `profile --demo`: its story, its snapshots, and the recording made of them."""

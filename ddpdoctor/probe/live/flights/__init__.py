"""The flight recorder of torch, read from inside."""

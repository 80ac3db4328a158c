"""The machine and the libraries around a rehearsed rank."""

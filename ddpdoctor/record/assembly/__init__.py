"""Events of all processes, put together to one record."""

"""Scripts whose ranks train what one process would, and the same scripts with a fault in it."""

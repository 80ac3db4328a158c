"""What the streams of a record consist of."""

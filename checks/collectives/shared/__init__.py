"""What several checks of this family share."""

"""Reports of people who did not know what was wrong, as scripts, with the place and the remedy that end the search."""

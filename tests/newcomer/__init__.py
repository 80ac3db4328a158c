"""What the documents print, done by someone who has never seen the tool."""

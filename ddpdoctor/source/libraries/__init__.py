"""What libraries beside torch do to ranks, models and loaders: a file a library."""

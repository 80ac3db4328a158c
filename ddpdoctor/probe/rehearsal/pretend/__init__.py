"""What a laptop lacks and a rehearsal does without: data sets, pretrained weights, experiment trackers."""

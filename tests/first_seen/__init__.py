"""What the tool said of cases at first sight: labelled before it saw them, and never changed afterwards."""

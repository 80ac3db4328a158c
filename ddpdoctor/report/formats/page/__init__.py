"""The templates and styles of the HTML report, and what fills them in."""

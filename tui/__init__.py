"""The terminal screen of ddpdoctor; nothing in the core imports it."""

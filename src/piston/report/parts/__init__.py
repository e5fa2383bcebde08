"""The parts of a page, one file each: from what was gathered to a section, or why it is missing."""

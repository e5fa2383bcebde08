"""Tokenizers of text and of actions.

Constructors only store where files are; the files are read at first use. Pickling, as for the
loader's workers, carries the location and not what was read.
"""

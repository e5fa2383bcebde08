"""A location (path, file://, http(s)://, gs://, hf://) becomes a local file or folder, once."""

from piston.assets.cache import DownloadError, home, resolve

__all__ = ["DownloadError", "home", "resolve"]

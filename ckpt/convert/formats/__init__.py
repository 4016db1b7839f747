"""Formats of other libraries, a module for each: `FORMAT` says how what is at a url is opened."""

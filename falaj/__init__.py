"""Falaj's public face: the command line, and the names for Python."""

from falaj.doubles import refuse_doubles

refuse_doubles()

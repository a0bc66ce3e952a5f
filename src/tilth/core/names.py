"""Names of files that stand in other files: whoever wrote those may have meant any file of this machine."""

import os

LONGEST = 255
"""Bytes of a name that file systems take."""


def name_problem(name: object, folders: bool = False) -> str:
    """Why this is not the name of a file in the folder of the file that names it; "" if it is.

    folders: it may lie in a folder there. Links are not followed: that is up to whoever opens it.
    """
    if not isinstance(name, str):
        return f"{name!r} is not the name of a file"
    parts = name.split("/")
    try:
        fits = all(0 < len(os.fsencode(part)) <= LONGEST for part in parts)
    except UnicodeEncodeError:
        fits = False
    if not fits or "\0" in name:
        return f"{name[:LONGEST]!r} is not the name of a file"
    if ".." in parts or "." in parts or (len(parts) > 1 and not folders):
        return f"{name!r} is not the name of a file in this folder"
    return ""

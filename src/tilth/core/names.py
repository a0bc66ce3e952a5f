"""Check file names that are read from other files, which could name any file of this machine."""

import os

LONGEST = 255  # most bytes of a name in common file systems


def name_problem(name: object, folders: bool = False) -> str:
    """Return why this does not name a file in the folder of the file that contains it; "" if it does.

    folders: allow folders below that one. Links are not followed: the caller that opens the file checks those.
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

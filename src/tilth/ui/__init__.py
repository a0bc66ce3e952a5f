"""Views of a run: in the terminal (``live``, ``top``), as a page (``report``), in trackers (``track``)."""

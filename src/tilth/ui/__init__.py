"""How people see a run: the terminal while it goes on (``live``), one page when they ask (``report``)."""

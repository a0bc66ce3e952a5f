"""Web page of the runs of a folder: ``tilth ui``. It shows what runs wrote and changes nothing."""

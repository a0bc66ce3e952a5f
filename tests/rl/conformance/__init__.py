"""Every registered algorithm against its formula: the checks, which ``benchmarks/conformance.py`` and tests share.

``table.py`` has the rows and columns; an entry that is registered and has no reference here fails.
"""

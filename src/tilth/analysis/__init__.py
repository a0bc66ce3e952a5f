"""Offline analysis of traces: readers, clocks, what-if, causes and export. It reads files only."""

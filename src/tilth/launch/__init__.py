"""Life of a run: build, begin, fail, restore, finish."""

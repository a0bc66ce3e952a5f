"""Colours of slowdowns in heat maps of workers."""

COOL, WARM = (0xF1, 0xEF, 0xE6), (0xD9, 0x76, 0x4F)  # ground and a pale clay, on which dark figures can be read
LOW, HIGH = 1.0, 1.5  # slowdowns at both ends of the colours, as in the study; values outside are clamped


def colour(value: float) -> tuple[int, int, int]:
    """Return red, green and blue of a slowdown, 0 to 255."""
    share = min(max((value - LOW) / (HIGH - LOW), 0.0), 1.0)
    red, green, blue = (round(a + share * (b - a)) for a, b in zip(COOL, WARM))
    return red, green, blue

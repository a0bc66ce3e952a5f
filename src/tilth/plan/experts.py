"""Volume of the two ways in which tokens reach their experts, and the choice between them (MegaScale-MoE, arXiv
2505.11432, section 3.2).

Each of n ranks along "ep" has t tokens of width h, and each token k experts. By exchange, a rank sends the row of each
(token, expert) to the rank of the expert, and gets a row back: 2 t k h (n - 1) / n elements if experts are used alike.
By gather, every rank gets all tokens, and sums of what each rank computed are scattered: 2 t h (n - 1).
"""

from typing import Literal

DispatchMode = Literal["exchange", "gather"]


def dispatch_elements(mode: DispatchMode, tokens: int, top_k: int, hidden: int, ranks: int) -> float:
    """Return the elements of token rows that a rank sends along "ep" in one forward pass of one layer.

    Its backward pass sends as many. tokens: of this rank; uniform routing is assumed.
    """
    copies = top_k if mode == "exchange" else ranks
    return 2 * tokens * hidden * copies * (ranks - 1) / ranks


def dispatch_mode(top_k: int, ranks: int) -> DispatchMode:
    """Return the mode with the smaller volume; both are equal for as many experts of a token as ranks."""
    volume = {mode: dispatch_elements(mode, 1, top_k, 1, ranks) for mode in ("exchange", "gather")}
    return "gather" if volume["gather"] < volume["exchange"] else "exchange"

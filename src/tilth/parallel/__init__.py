"""How one program spreads over devices: grids of processes, and layouts applied to one-device models from outside."""

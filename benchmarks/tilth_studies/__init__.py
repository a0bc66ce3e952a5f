"""Studies beside the product: foreign traces of stragglers, and training time under recorded faults of nodes."""

"""Detection, diagnosis and recovery while a run goes on."""

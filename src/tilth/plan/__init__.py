"""Predictions and plans: pure functions of tables, without torch."""

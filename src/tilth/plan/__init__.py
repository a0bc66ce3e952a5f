"""What would happen: pure functions of tables, without torch."""

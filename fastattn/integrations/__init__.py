"""What other libraries call fastattn by: one module for each, imported on its own."""

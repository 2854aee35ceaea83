"""Capacity planning: one capture, planned for many clusters, budgets, batches and sequences."""

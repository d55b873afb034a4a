"""Seeded recordings of reported faults and their clean twins. See cases/README.md."""

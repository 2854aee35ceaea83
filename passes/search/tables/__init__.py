"""The times of stages, and memory -> the table in which they run: :func:`passes.search.tables.search.search_table`."""

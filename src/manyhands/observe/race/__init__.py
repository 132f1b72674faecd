"""Reports of a race: results, table, picture, page, live view."""

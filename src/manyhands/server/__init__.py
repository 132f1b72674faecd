"""The parameter server: tables of rows that any rank pulls and pushes, with the optimizer where the rows are."""

"""The documents are true: their code runs, their links lead somewhere."""

"""A phone book to look numbers up in, and a reward for short answers: a plug-in of asyncrl."""

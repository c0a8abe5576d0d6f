"""The workers as the router knows them: who there is, how they stand, what is reserved."""
